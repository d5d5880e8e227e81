"""GradingService: grade one episode now, and admit tasks."""

from typing import Any

from practicum.errors import InvalidInput
from practicum.ids import new_id
from practicum.v1 import reward_pb2 as pb
from practicum.v1 import reward_pb2_grpc
from practicum.wire import grade_to_pb, outcome_from_pb, outcome_to_pb
from services.reward.admission.checks import admit
from services.reward.grading import Grading
from services.reward.rpc.convert import changes_from_pb, task_from_pb
from services.reward.sandbox.limits import SandboxLimits
from services.reward.tools.schemas import SCHEMAS


class GradingServicer(reward_pb2_grpc.GradingServiceServicer):
    """See proto/practicum/v1/reward.proto. Grades made here are answered, not stored."""

    def __init__(self, grading: Grading, defaults: SandboxLimits) -> None:
        self._grading = grading
        self._defaults = defaults

    async def Grade(self, request: pb.GradeRequest, context: Any) -> pb.GradeResponse:
        """Grades one episode now."""
        grading_id = request.trajectory.trajectory_id
        if not grading_id:
            raise InvalidInput("trajectory.trajectory_id", "is empty")
        graded = await self._grading.grade(
            grading_id,
            task_from_pb(request.task, self._defaults),
            changes_from_pb(request.diff),
            outcome_from_pb(request.trajectory.outcome),
        )
        return pb.GradeResponse(grade=grade_to_pb(graded.grade), outcome=outcome_to_pb(graded.outcome))

    async def Admit(self, request: pb.AdmitRequest, context: Any) -> pb.AdmitResponse:
        """Checks that a task is fit to be trained on."""
        task = task_from_pb(request.task, self._defaults)
        unknown = [name for name in task.tools if name not in SCHEMAS]
        if unknown:
            raise InvalidInput("tools", f"no tool {unknown[0]!r}; there are {', '.join(SCHEMAS)}")
        reference = changes_from_pb(request.reference) if request.HasField("reference") else None
        grader = self._grading.grader(task.grader.kind)
        checks = await admit(new_id("admit"), task, reference, grader)
        return pb.AdmitResponse(
            admitted=all(check.ok for check in checks),
            checks=[pb.AdmissionCheck(name=check.name, ok=check.ok, detail=check.detail) for check in checks],
        )
