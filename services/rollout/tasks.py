"""A task as this service holds it: what an episode needs, and the rest as the reward service's own bytes."""

from dataclasses import dataclass
from enum import StrEnum


class TaskState(StrEnum):
    """Whether a task may be trained or evaluated."""

    ADMITTING = "admitting"
    ADMITTED = "admitted"
    REJECTED = "rejected"


class Split(StrEnum):
    """Which part of a suite a task belongs to."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of a suite."""

    task_id: str
    suite_id: str
    position: int  # in its suite, from 0
    name: str
    split: Split
    instruction: str
    tools: tuple[str, ...]
    tags: tuple[str, ...]
    session_wall_s: float  # seconds of generation and tools the policy may spend; 0 = the service's default
    spec: bytes  # a serialised `TaskSpec`: workspace, grader, limits
    reference: bytes | None  # a serialised `WorkspaceDiff`; None = the author gave no solution
    state: TaskState
    reasons: tuple[dict[str, object], ...] = ()  # the admission checks, in order
