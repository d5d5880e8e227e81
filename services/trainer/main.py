"""The trainer process: reads the environment, builds the parts, serves.

Parts, none of which knows another but through what is passed here: store (SQL), queue (Redis), one
compute thread, the worker, the sweeper, REST, gRPC, and a channel to the rollout service.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from prometheus_client import CollectorRegistry

from practicum.clock import SystemClock
from practicum.db.engine import check
from practicum.errors import PracticumError
from practicum.queue.redis_streams import RedisQueue
from practicum.rest.app import create_app
from practicum.rpc.client import call, connect
from practicum.rpc.server import start_server
from practicum.service import run_service
from practicum.startup import start
from practicum.telemetry.logs import get_logger
from practicum.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from services.trainer.checkpoints.publish import Send
from services.trainer.compute import ComputeThread
from services.trainer.events import Events
from services.trainer.megatron.backend import MegatronBackend
from services.trainer.metrics import TrainerMetrics
from services.trainer.progress import ProgressBoard
from services.trainer.rest.routes import checkpoints_router, runs_router
from services.trainer.rpc.servicer import TrainerServicer
from services.trainer.rpc.suites import suite_check
from services.trainer.session import SessionParts
from services.trainer.settings import TrainerSettings
from services.trainer.store import MIGRATIONS, open_store
from services.trainer.sweeper import StreamSweeper
from services.trainer.worker import TrainerWorker

log = get_logger("trainer.main")

# Entries stay unacknowledged until their step commits, which may take long. A restart finds them by
# the consumer's name, so nobody may ever take them over or bury them meanwhile.
HOLD_S = 10 * 365 * 86_400.0
MAX_DELIVERIES = 1_000_000
CANCEL_TIMEOUT_S = 10.0

DESCRIPTION = """Takes graded trajectories, trains, commits checkpoints and publishes them.

A run takes `num_steps` steps; every step is durable before it is shown here, and no trajectory is
trained twice. One run trains at a time; the others wait in the order in which they were made."""


async def serve(settings: TrainerSettings) -> None:
    """Run the service until it is told to stop."""
    clock, registry = SystemClock(), CollectorRegistry()
    store = open_store(settings.database_url, clock)
    queue = RedisQueue(settings.redis_url, clock=clock, claim_after_s=HOLD_S, max_deliveries=MAX_DELIVERIES)
    compute = ComputeThread(settings.trainer_threads)
    token = settings.keyring
    channel = connect(settings.rollout_rpc, token=token) if settings.rollout_rpc else None
    progress = ProgressBoard(clock)
    worker = TrainerWorker(
        SessionParts(
            store=store,
            queue=queue,
            compute=compute,
            metrics=TrainerMetrics(registry),
            progress=progress,
            clock=clock,
            events=Events(queue),
            load_backend=MegatronBackend.load,
            send=None if channel is None else _sender(channel, settings.trainer_publish_timeout_s),
            consumer=settings.trainer_instance,
            checkpoint_root=settings.checkpoint_root,
            keep_checkpoints=settings.trainer_keep_checkpoints,
            unusable_batches=settings.trainer_unusable_batches,
            first_retry_s=settings.trainer_retry_s,
            checkpoint_patience_s=settings.trainer_checkpoint_patience_s,
            publish_patience_s=settings.trainer_publish_patience_s,
            publish_tolerance=settings.trainer_publish_tolerance,
            reward_low=settings.trainer_reward_low,
            reward_high=settings.trainer_reward_high,
        ),
        attempts=settings.trainer_attempts,
        cancel_episodes=_canceller(channel),
    )
    rpc = await start_server(
        [partial(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(store, worker.find))],
        service_names=[trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name],
        address=f"{settings.rpc_host}:{settings.rpc_port}",
        token=token,
    )
    app = create_app(
        title="Practicum trainer",
        description=DESCRIPTION,
        token=token,
        routers=[
            runs_router(
                store,
                progress,
                worker.wake,
                check_suite=None if channel is None else suite_check(channel),
            ),
            checkpoints_router(store),
        ],
        readiness={"database": partial(check, store.engine), "queue": queue.ping},
        registry=registry,
    )
    await run_service(
        name="trainer",
        app=app,
        host=settings.rest_host,
        port=settings.rest_port,
        rpc=rpc,
        workers={"train": worker.run, "sweep": StreamSweeper(store, queue, clock).run},
        drain_timeout_s=settings.drain_timeout_s,
        close=[
            compute.close,
            queue.close,
            store.engine.dispose,
            *([] if channel is None else [channel.close]),
        ],
    )


def _sender(channel: grpc.aio.Channel, timeout_s: float) -> Send:
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]

    async def send(request: rollout_pb2.PublishWeightsRequest) -> rollout_pb2.PublishWeightsResponse:
        return await call(stub.PublishWeights, request, timeout_s=timeout_s)

    return send


def _canceller(channel: grpc.aio.Channel | None) -> Callable[[str], Awaitable[None]]:
    async def cancel(run_id: str) -> None:
        if channel is None:
            return
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        try:
            await call(stub.Cancel, rollout_pb2.CancelRequest(run_id=run_id), timeout_s=CANCEL_TIMEOUT_S)
        except PracticumError as error:
            # It also sees the run's state by itself; this only makes it sooner.
            log.warning("episodes.not_cancelled", run_id=run_id, error=str(error))

    return cancel


def main() -> None:
    """The process's entry."""
    settings = start("trainer", TrainerSettings, migrations=MIGRATIONS)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
