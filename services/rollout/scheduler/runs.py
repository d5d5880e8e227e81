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

    Group i is consumed by step i // groups_per_step, whose trainer holds that version. Started under the
    served version v, its tokens lag by i // groups_per_step - v at most, so the bound on i is
    (v + max_staleness + 1) * groups_per_step. The groups that the trainer says it consumed bound it too:
    whichever is behind holds the other back.
    """
    steps_behind = min(served_version, run.groups_consumed // run.groups_per_step)
    bounded = (steps_behind + run.max_staleness + 1) * run.groups_per_step
    return min(bounded, run.num_steps * run.groups_per_step)
