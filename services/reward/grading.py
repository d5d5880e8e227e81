"""From a finished episode to its grade: which grader, which outcome, and what is never graded.

The one place where an outcome and a reward are decided together: a timeout the policy caused gives 0, a
platform failure gives no reward, tampering gives 0 with evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from practicum.clock import Clock
from practicum.errors import GraderError, InvalidInput
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Grade, GradeComponent, Outcome
from services.reward.graders.base import Grader, Task, Verdict
from services.reward.integrity.paths import check_files
from services.reward.metrics import RewardMetrics
from services.reward.sandbox.base import Changes

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """A grade and the outcome after grading."""

    grade: Grade
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """Grades episodes with the graders it was given, by kind."""

    graders: Mapping[str, Grader]
    metrics: RewardMetrics
    clock: Clock

    def grader(self, kind: str) -> Grader:
        """The grader of a kind. Raises `InvalidInput` that lists the known ones."""
        grader = self.graders.get(kind)
        if grader is None:
            known = ", ".join(sorted(self.graders))
            raise InvalidInput("grader.kind", f"{kind!r} is unknown; there are: {known}")
        return grader

    async def grade(self, grading_id: str, task: Task, changes: Changes, outcome: Outcome) -> Graded:
        """The grade of one episode; never raises for what the platform broke.

        Raises `InvalidInput` where the task cannot be graded by anyone.
        """
        started_s = self.clock.monotonic()
        grader = self.grader(task.grader.kind)
        check_files("workspace", task.workspace)
        check_files("grader", task.grader.files)
        grader.check(task.grader)
        graded = await self._grade(grader, grading_id, task, changes, outcome)
        seconds = self.clock.monotonic() - started_s
        self.metrics.grades.labels(outcome=graded.outcome.value).inc()
        self.metrics.grade_seconds.observe(seconds)
        _log.info(
            "trajectory.graded",
            grading_id=grading_id,
            task_id=task.task_id,
            outcome=graded.outcome.value,
            reward=graded.grade.reward,
            seconds=round(seconds, 4),
        )
        return graded

    async def _grade(
        self, grader: Grader, grading_id: str, task: Task, changes: Changes, outcome: Outcome
    ) -> Graded:
        if outcome in (Outcome.INFRA_FAILED, Outcome.CANCELLED):
            return Graded(
                grade=_without_reward(f"an episode that was {outcome.value} is not graded"), outcome=outcome
            )
        if outcome is Outcome.TIMED_OUT:
            return Graded(grade=_zero(task, "the episode ran out of its wall time"), outcome=outcome)
        try:
            verdict: Verdict = await grader.grade(grading_id, task, changes)
        except GraderError as error:
            _log.error("grading.failed", grading_id=grading_id, task_id=task.task_id, error=str(error))
            return Graded(grade=_without_reward(str(error)), outcome=Outcome.INFRA_FAILED)
        return Graded(grade=verdict.grade, outcome=Outcome.TAMPERED if verdict.tampered else outcome)


def _without_reward(reason: str) -> Grade:
    return Grade(reward=None, evidence=(reason,))


def _zero(task: Task, reason: str) -> Grade:
    component = GradeComponent(name=task.grader.kind, value=0.0, weight=1.0)
    return Grade(reward=0.0, components=(component,), evidence=(reason,), grader=task.grader.kind)
