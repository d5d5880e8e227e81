"""`RolloutService`: the trainer's way to the engines."""

from typing import Any

import grpc
import numpy as np

from practicum.errors import Conflict, InvalidInput, NotFound
from practicum.rpc.codes import RpcUnavailable
from practicum.v1 import rollout_pb2 as pb
from practicum.v1.rollout_pb2_grpc import RolloutServiceServicer
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.weights import Probe, Publication, WeightPublisher
from services.rollout.scheduler.follower import RunFollower
from services.rollout.scheduler.runs import RunState, Trainer
from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import Split, TaskState

Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_TOLERANCE = 1e-2


class RolloutServicer(RolloutServiceServicer):
    """Translates, calls, translates back."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        publisher: WeightPublisher,
        follower: RunFollower,
        trainer: Trainer,
        suites: SuiteStore,
    ) -> None:
        self._pool = pool
        self._publisher = publisher
        self._follower = follower
        self._trainer = trainer
        self._suites = suites

    async def PublishWeights(
        self, request: pb.PublishWeightsRequest, context: Context
    ) -> pb.PublishWeightsResponse:
        """Update one engine, prove it, then the others."""
        publication = _publication(request)
        await self._refuse_takeover(publication.run_id)
        report = await self._publisher.publish(publication)
        self._follower.look_now()
        return pb.PublishWeightsResponse(
            ok=report.ok,
            weight_version=report.weight_version,
            engines=[
                pb.EnginePublishResult(
                    engine_id=result.engine_id,
                    ok=result.ok,
                    weight_version=result.weight_version,
                    max_logprob_diff=result.max_logprob_diff,
                    paused_s=result.paused_s,
                    error=result.error,
                )
                for result in report.engines
            ],
        )

    async def GetVersions(self, request: pb.GetVersionsRequest, context: Context) -> pb.GetVersionsResponse:
        """What is served now."""
        serving = self._pool.serving
        return pb.GetVersionsResponse(
            weight_version=serving.weight_version if serving else 0,
            run_id=serving.run_id if serving else "",
            engines={engine.engine_id: max(0, engine.weight_version) for engine in self._pool.engines},
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End a run's episodes."""
        if not request.run_id:
            raise InvalidInput("run_id", "is empty")
        return pb.CancelResponse(num_episodes=await self._follower.cancel(request.run_id))

    async def GetSuite(self, request: pb.GetSuiteRequest, context: Context) -> pb.GetSuiteResponse:
        """One suite with the state of its train split; NOT_FOUND where there is none."""
        suite = await self._suites.find(request.suite)
        if suite is None:
            raise NotFound(f"there is no suite {request.suite!r}")
        counts = (await self._suites.counts([suite.suite_id]))[suite.suite_id]
        return pb.GetSuiteResponse(
            suite_id=suite.suite_id,
            num_train_admitted=counts.get((Split.TRAIN, TaskState.ADMITTED), 0),
            num_train_admitting=counts.get((Split.TRAIN, TaskState.ADMITTING), 0),
        )

    async def _refuse_takeover(self, run_id: str) -> None:
        """Two running runs cannot share the engines: each would sample from the other's weights."""
        await self._publisher.refresh()  # another replica may have served a run since
        serving = self._pool.serving
        if serving is None or serving.run_id in ("", run_id):
            return
        try:
            state = await self._trainer.state_of(serving.run_id)
        except (NotFound, RpcUnavailable):
            return
        if state is RunState.RUNNING:
            raise Conflict(
                f"the engines serve run {serving.run_id}, which is running; stop or pause it first"
            )


def _publication(request: pb.PublishWeightsRequest) -> Publication:
    for name in ("run_id", "path"):
        if not getattr(request, name):
            raise InvalidInput(name, "is empty")
    if request.weight_version < 0:
        raise InvalidInput("weight_version", "is negative")
    probes = []
    for index, probe in enumerate(request.probes):
        if len(probe.token_ids) != len(probe.logprobs) or len(probe.token_ids) % 4 or not probe.token_ids:
            raise InvalidInput(
                f"probes[{index}]", "needs as many 4-byte ids as 4-byte logprobs, at least one"
            )
        probes.append(
            Probe(
                token_ids_T=np.frombuffer(probe.token_ids, dtype="<i4"),
                logprobs_T=np.frombuffer(probe.logprobs, dtype="<f4"),
            )
        )
    return Publication(
        run_id=request.run_id,
        weight_version=request.weight_version,
        path=request.path,
        manifest_sha256=request.manifest_sha256,
        probes=tuple(probes),
        tolerance=request.tolerance or DEFAULT_TOLERANCE,
        rollback=request.rollback,
    )
