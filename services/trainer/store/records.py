"""What the store hands out and takes in, as frozen values."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.trainer.spec import RunSpec, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as it stands."""

    run_id: str
    state: RunState
    error: str
    spec: RunSpec
    weight_version: int  # -1 = not even the base weights are committed
    published_version: int | None  # None = none yet
    publish_error: str
    groups_consumed: int
    batches_discarded: int
    duplicates_refused: int
    superseded_refused: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A committed step."""

    step: int
    metrics: dict[str, Any]
    publish: dict[str, Any] | None  # None = not published, or overtaken by a newer version
    committed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A committed checkpoint."""

    checkpoint_id: str
    run_id: str
    weight_version: int
    path: str
    manifest_sha256: str
    size_bytes: int
    created_at: datetime
    retired_at: datetime | None  # None = on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedEpisode:
    """One episode that a step, or a discarded batch, takes for good."""

    episode_id: str
    trajectory_id: str
    attempt: int
    group_id: str
    task_id: str
    trained: bool
    reward: float | None  # None = not graded, never 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """What committed steps and discarded batches took: what must never be held again."""

    attempts: dict[str, int]  # by episode id
    group_ids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRecord:
    """A trajectory that was set aside."""

    quarantine_id: str
    run_id: str
    event_id: str
    trajectory_id: str  # "" = could not be read
    episode_id: str
    group_id: str
    reason: str
    message: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The sort key of the last row of a page."""

    created_at: datetime
    row_id: str
