"""The trainer service as the scheduler asks it."""

import grpc

from practicum.rpc.client import call
from practicum.v1 import trainer_pb2 as pb
from practicum.v1.trainer_pb2_grpc import TrainerServiceStub
from practicum.wire import sampling_from_pb
from services.rollout.scheduler.runs import PublishedCheckpoint, Run, RunState

_STATES = {
    pb.RUN_STATE_PENDING: RunState.PENDING,
    pb.RUN_STATE_RUNNING: RunState.RUNNING,
    pb.RUN_STATE_PAUSED: RunState.PAUSED,
    pb.RUN_STATE_COMPLETED: RunState.COMPLETED,
    pb.RUN_STATE_STOPPED: RunState.STOPPED,
    pb.RUN_STATE_FAILED: RunState.FAILED,
}
_DEADLINE_S = 10.0


class RemoteTrainer:
    """The `Trainer` of the scheduler, over gRPC; every method raises `RpcUnavailable` when it is away."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = TrainerServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]

    async def running(self) -> list[Run]:
        """Running runs that want groups, oldest first."""
        request = pb.ListRunsRequest(states=[pb.RUN_STATE_RUNNING])
        answer = await call(self._stub.ListRuns, request, timeout_s=_DEADLINE_S)
        return [_run(run) for run in answer.runs if run.HasField("rollout")]

    async def state_of(self, run_id: str) -> RunState:
        """Where a run stands."""
        run = await call(self._stub.GetRun, pb.GetRunRequest(run_id=run_id), timeout_s=_DEADLINE_S)
        return _STATES.get(run.state, RunState.FAILED)

    async def checkpoint(self, run_id: str) -> PublishedCheckpoint:
        """The newest committed weights of a run."""
        request = pb.GetCheckpointRequest(run_id=run_id)
        found = await call(self._stub.GetCheckpoint, request, timeout_s=_DEADLINE_S)
        return PublishedCheckpoint(
            run_id=found.run_id,
            weight_version=found.weight_version,
            path=found.path,
            manifest_sha256=found.manifest_sha256,
        )


def _run(message: pb.Run) -> Run:
    spec = message.rollout
    return Run(
        run_id=message.run_id,
        state=_STATES.get(message.state, RunState.FAILED),
        suite=spec.suite,
        group_size=max(1, spec.group_size),
        groups_per_step=max(1, spec.groups_per_step),
        max_turns=spec.max_turns,
        max_tokens=spec.max_tokens,
        sampling=sampling_from_pb(spec.sampling),
        max_staleness=max(0, spec.max_staleness),
        seed=spec.seed,
        num_steps=message.num_steps,
        weight_version=message.weight_version,
        groups_consumed=message.groups_consumed,
    )
