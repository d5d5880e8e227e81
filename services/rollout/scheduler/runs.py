"""A run as the scheduler needs it, and the staleness rule."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from practicum.trajectory import SamplingParams


class RunState(StrEnum):
    """Where a run stands at the trainer."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether its episodes are wanted by nobody."""
        return self in (RunState.COMPLETED, RunState.STOPPED, RunState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run with its rollout settings."""

    run_id: str
    state: RunState
    suite: str
    group_size: int
    groups_per_step: int
    max_turns: int
    max_tokens: int
    sampling: SamplingParams
    max_staleness: int
    seed: int
    num_steps: int
    weight_version: int  # committed at the trainer
    groups_consumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCheckpoint:
    """Where a run's weights lie."""

    run_id: str
    weight_version: int
    path: str
    manifest_sha256: str


class Trainer(Protocol):
    """What the rollout service asks the trainer."""

    async def running(self) -> list[Run]:
        """Running runs that want groups, oldest first."""
        ...

    async def state_of(self, run_id: str) -> RunState:
        """Where a run stands; `NotFound` for one the trainer does not know."""
        ...

    async def checkpoint(self, run_id: str) -> PublishedCheckpoint:
        """The newest committed weights of a run; `NotFound` where there are none."""
        ...


def group_limit(run: Run, *, served_version: int) -> int:
    """Groups of the run that may have been started by now.

    Group i is in batch b = i // groups_per_step. Of the batches before it, d were discarded: they took their
    groups and made no version, so the trainer that takes batch b holds version b - d at most. Started under
    the served version v, the group's tokens lag by b - d - v at most, so the bound on i is
    (v + d + max_staleness + 1) * groups_per_step. The batches that the trainer says it took bound it too:
    whichever is behind holds the other back.
    """
    num_taken = run.groups_consumed // run.groups_per_step
    num_discarded = max(0, num_taken - run.weight_version)
    num_batches = min(served_version + num_discarded, num_taken)
    bounded = (num_batches + run.max_staleness + 1) * run.groups_per_step
    return min(bounded, run.num_steps * run.groups_per_step)
