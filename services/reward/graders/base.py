"""What a grader is given and what it returns; the registry is in the composition root."""

from dataclasses import dataclass
from typing import Protocol

from practicum.trajectory import Grade
from services.reward.sandbox.base import Changes, File
from services.reward.sandbox.limits import SandboxLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderSpec:
    """How a task is graded. Never enters an episode's sandbox."""

    kind: str
    files: tuple[File, ...]
    editable: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The part of a task that the reward service needs."""

    task_id: str
    workspace: tuple[File, ...]
    tools: tuple[str, ...]
    grader: GraderSpec
    limits: SandboxLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A grade, and whether the policy tampered with the grading."""

    grade: Grade
    tampered: bool


class Grader(Protocol):
    """Grades changes to a task's workspace."""

    def check(self, spec: GraderSpec) -> None:
        """Raises `InvalidInput` that says what to mend where nobody could grade with this."""
        ...

    async def grade(self, grading_id: str, task: Task, changes: Changes) -> Verdict:
        """Raises `InvalidInput` as `check` does, and `GraderError` where the platform could not grade."""
        ...
