"""The reward process: reads the environment, builds the parts, serves.

Parts, none of which knows another but through what is passed here: the sandbox backend (attacked before it
may serve), episodes' sessions, graders, the store (SQL), the queue (Redis), the grading worker, REST, gRPC.
"""

import asyncio
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry

from practicum.clock import SystemClock
from practicum.db.engine import check, create_engine
from practicum.errors import SandboxError
from practicum.queue.redis_streams import RedisQueue
from practicum.rest.app import create_app
from practicum.rpc.server import start_server
from practicum.service import run_service
from practicum.startup import start
from practicum.telemetry.logs import get_logger
from practicum.v1 import reward_pb2, reward_pb2_grpc
from services.reward.graders import tests
from services.reward.grading import Grading
from services.reward.integrity.clean_room import CleanRoom
from services.reward.metrics import RewardMetrics
from services.reward.rest.routes import grades_router, sandbox_router
from services.reward.rpc.grading_service import GradingServicer
from services.reward.rpc.sandbox_service import SandboxServicer
from services.reward.sandbox.bubblewrap import BubblewrapSandbox
from services.reward.sandbox.limits import SandboxLimits
from services.reward.sandbox.self_check import require_safe
from services.reward.sessions.registry import SessionRegistry
from services.reward.settings import RewardSettings
from services.reward.store import MIGRATIONS
from services.reward.store.grades import GradeStore
from services.reward.worker.consumer import GradingWorker

log = get_logger("reward.main")

DESCRIPTION = """Runs episodes' tools in sandboxes and grades what came of them in clean ones.

A grade without a reward means that the platform could not grade; it is never to be read as 0."""


async def serve(settings: RewardSettings) -> None:
    """Run the service until it is told to stop. Raises `SandboxError` where the sandbox does not hold."""
    clock, registry = SystemClock(), CollectorRegistry()
    metrics, defaults = RewardMetrics(registry), limits_of(settings)
    token = settings.keyring
    sandbox = BubblewrapSandbox()
    await sandbox.start()
    findings = await require_safe(sandbox)
    log.info("sandbox.held", backend=sandbox.name, attacks=[finding.attack for finding in findings])
    engine = create_engine(settings.database_url)
    store = GradeStore(engine)
    queue = RedisQueue(
        settings.redis_url,
        clock=clock,
        claim_after_s=settings.claim_after_s,
        max_deliveries=settings.max_deliveries,
    )
    sessions = SessionRegistry(
        sandbox,
        clock,
        max_sessions=settings.reward_max_sessions,
        idle_timeout_s=settings.reward_idle_timeout_s,
        gauge=metrics.open_sessions,
    )
    clean_room = CleanRoom(sandbox=sandbox, slots=asyncio.Semaphore(settings.reward_grading_concurrency))
    graders = {tests.NAME: tests.TestsGrader(clean_room=clean_room, clock=clock)}
    grading = Grading(graders=graders, metrics=metrics, clock=clock)
    worker = GradingWorker(
        queue=queue,
        grading=grading,
        store=store,
        clock=clock,
        defaults=defaults,
        consumer=settings.reward_instance,
        concurrency=settings.reward_grading_concurrency,
        renew_every_s=settings.claim_after_s / 3,
    )
    rpc = await start_server(
        [
            partial(
                reward_pb2_grpc.add_SandboxServiceServicer_to_server,
                SandboxServicer(sessions, defaults, sandbox.name, metrics, settings.advertised),
            ),
            partial(reward_pb2_grpc.add_GradingServiceServicer_to_server, GradingServicer(grading, defaults)),
        ],
        service_names=[service.full_name for service in reward_pb2.DESCRIPTOR.services_by_name.values()],
        address=f"{settings.rpc_host}:{settings.rpc_port}",
        token=token,
        intake=[
            "/practicum.v1.SandboxService/Open",
            "/practicum.v1.GradingService/Grade",
            "/practicum.v1.GradingService/Admit",
        ],
    )
    app = create_app(
        title="Practicum reward",
        description=DESCRIPTION,
        token=token,
        routers=[
            grades_router(store, grading, defaults),
            sandbox_router(
                sandbox,
                {finding.attack: finding for finding in findings},
                sessions,
                settings.reward_max_sessions,
            ),
        ],
        readiness={"database": partial(check, engine), "queue": queue.ping, "sandbox": sandbox.start},
        registry=registry,
    )
    await run_service(
        name="reward",
        app=app,
        host=settings.rest_host,
        port=settings.rest_port,
        rpc=rpc,
        workers={"grade": worker.run, "reap": sessions.reap},
        drain_timeout_s=settings.drain_timeout_s,
        close=[sessions.close_all, sandbox.close, queue.close, engine.dispose],
    )


def limits_of(settings: RewardSettings) -> SandboxLimits:
    """The default limits of a sandbox."""
    return SandboxLimits(
        session_wall_s=settings.reward_session_wall_s,
        call_wall_s=settings.reward_call_wall_s,
        cpu_s=settings.reward_cpu_s,
        memory_bytes=settings.reward_memory_bytes,
        num_processes=settings.reward_num_processes,
        file_size_bytes=settings.reward_file_size_bytes,
        output_bytes=settings.reward_output_bytes,
    )


def main() -> None:
    """The process's entry."""
    settings = start("reward", RewardSettings, migrations=MIGRATIONS)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except SandboxError as error:
        log.error("reward.refused_to_serve", error=str(error))
        raise SystemExit(f"the reward service does not serve: {error}") from None


if __name__ == "__main__":
    main()
