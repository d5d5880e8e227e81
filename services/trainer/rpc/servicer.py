"""What the rollout service asks the trainer: which runs want groups, and where the weights are."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from practicum.errors import InvalidInput, NotFound
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Trajectory
from practicum.v1 import trainer_pb2 as pb
from practicum.v1 import trainer_pb2_grpc, trajectory_pb2
from practicum.wire import trajectory_to_pb
from services.trainer.spec import RunState
from services.trainer.store import TrainerStore
from services.trainer.store.records import CheckpointRecord, RunRecord

log = get_logger("trainer.rpc")

CHUNK_BYTES = 1 << 20

_STATE_TO_PB = {
    RunState.PENDING: pb.RUN_STATE_PENDING,
    RunState.RUNNING: pb.RUN_STATE_RUNNING,
    RunState.PAUSED: pb.RUN_STATE_PAUSED,
    RunState.COMPLETED: pb.RUN_STATE_COMPLETED,
    RunState.STOPPED: pb.RUN_STATE_STOPPED,
    RunState.FAILED: pb.RUN_STATE_FAILED,
}
_STATE_FROM_PB = {number: state for state, number in _STATE_TO_PB.items()}


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Reads of the store; nothing here changes anything."""

    def __init__(self, store: TrainerStore, find_held: Callable[[str], Trajectory | None]) -> None:
        self._store = store
        self._find_held = find_held

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
        """One run; NOT_FOUND where there is none."""
        return run_to_pb(await self._store.runs.get(request.run_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """Runs by state, oldest first; one that no message can hold is left out."""
        states = set()
        for number in request.states:
            state = _STATE_FROM_PB.get(number)
            if state is None:
                raise InvalidInput("states", f"run state {number} is not known")
            states.add(state)
        runs = []
        for run in await self._store.runs.in_states(states):
            try:
                runs.append(run_to_pb(run))
            except (ValueError, OverflowError) as error:
                # It must not hold up the others.
                log.error("run.not_told", run_id=run.run_id, error=str(error))
        return pb.ListRunsResponse(runs=runs)

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Any) -> pb.Checkpoint:
        """A committed checkpoint; NOT_FOUND where there is none, or where its folder was removed."""
        wanted = request.weight_version if request.HasField("weight_version") else None
        checkpoint = await self._store.checkpoints.of_run(request.run_id, wanted)
        if checkpoint.retired_at is not None:
            raise NotFound(f"version {checkpoint.weight_version} of run {checkpoint.run_id} was retired")
        return checkpoint_to_pb(checkpoint)

    async def FetchTrajectory(
        self, request: pb.FetchTrajectoryRequest, context: Any
    ) -> AsyncIterator[pb.TrajectoryChunk]:
        """A trajectory that waits for its step, or one that was set aside; NOT_FOUND for others."""
        held = self._find_held(request.trajectory_id)
        if held is not None:
            message: trajectory_pb2.Trajectory = trajectory_to_pb(held)
            payload: bytes | None = message.SerializeToString()
        else:
            payload = await self._store.quarantine.payload(request.trajectory_id)
        if payload is None:
            raise NotFound(f"trajectory {request.trajectory_id} is neither waiting nor quarantined here")
        for start in range(0, len(payload), CHUNK_BYTES):
            yield pb.TrajectoryChunk(data=payload[start : start + CHUNK_BYTES])


def run_to_pb(run: RunRecord) -> pb.Run:
    """A run as the rollout service needs it."""
    message = pb.Run(
        run_id=run.run_id,
        state=_STATE_TO_PB[run.state],
        weight_version=max(run.weight_version, 0),
        # A discarded batch is made up for: the rollout may start as many groups again.
        num_steps=run.spec.num_steps + run.batches_discarded,
        groups_consumed=run.groups_consumed,
    )
    rollout = run.spec.rollout
    if rollout is not None:
        message.rollout.CopyFrom(
            pb.RolloutSpec(
                suite=rollout.suite,
                group_size=rollout.group_size,
                groups_per_step=rollout.groups_per_step,
                max_turns=rollout.max_turns,
                max_tokens=rollout.max_tokens,
                sampling=trajectory_pb2.SamplingParams(
                    temperature=rollout.temperature,
                    top_p=rollout.top_p,
                    top_k=rollout.top_k,
                    max_new_tokens=rollout.max_new_tokens,
                ),
                max_staleness=rollout.max_staleness,
                seed=rollout.seed,
            )
        )
    return message


def checkpoint_to_pb(checkpoint: CheckpointRecord) -> pb.Checkpoint:
    """A committed checkpoint."""
    return pb.Checkpoint(
        run_id=checkpoint.run_id,
        weight_version=checkpoint.weight_version,
        path=checkpoint.path,
        manifest_sha256=checkpoint.manifest_sha256,
    )
