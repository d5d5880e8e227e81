"""Puts the parts of the service together, whatever stands behind the seams.

    rest, rpc ──► scheduler (follower, evaluations, demonstrations, admission, grades, reconciler)
                      │──► runner ──► episode loop ──► engine pool, sandboxes (reward service)
                      └──► store (SQL), queue (Redis Streams)

No part refers back to this module. It makes no connection and reads no environment: `main` does.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random

import grpc
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.clock import Clock
from practicum.db import engine as db
from practicum.errors import EngineError
from practicum.queue.base import Queue
from practicum.rest.app import create_app
from practicum.service import Worker
from practicum.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from services.rollout.chat import ChatTemplate
from services.rollout.engine.keeper import EngineKeeper
from services.rollout.engine.pool import EnginePool, Serving
from services.rollout.engine.weights import WeightPublisher
from services.rollout.metrics import EngineCollector, Metrics
from services.rollout.rest.episodes import episode_router
from services.rollout.rest.suites import suite_router
from services.rollout.rest.work import demonstration_router, engine_router, evaluation_router
from services.rollout.rpc.sandboxes import Admissions, RemoteSandboxes, ToolCatalogue
from services.rollout.rpc.servicer import RolloutServicer
from services.rollout.scheduler.admission import Admitter
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.demonstrations import DemonstrationPlayer
from services.rollout.scheduler.evaluations import EvaluationPlayer
from services.rollout.scheduler.follower import RunFollower
from services.rollout.scheduler.grades import GradeTaker
from services.rollout.scheduler.healing import WeightHealer
from services.rollout.scheduler.jobs import JobMaker
from services.rollout.scheduler.reconciler import Reconciler
from services.rollout.scheduler.runner import EpisodeRunner, Retry
from services.rollout.scheduler.runs import Trainer
from services.rollout.scheduler.selection import TaskShelf
from services.rollout.settings import RolloutSettings
from services.rollout.store.demonstrations import DemonstrationStore
from services.rollout.store.episodes import EpisodeStore
from services.rollout.store.evaluations import EvaluationStore
from services.rollout.store.serving import ServingStore
from services.rollout.store.suites import SuiteStore

DESCRIPTION = "Turns tasks into trajectories: suites, episodes, evaluations, demonstrations and engines."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What stands around the service."""

    database: AsyncEngine
    queue: Queue
    reward: grpc.aio.Channel
    trainer: Trainer
    pool: EnginePool
    stored: Serving | None  # what was served when the service last ran; None = it never served
    chat: ChatTemplate
    context_length: int
    clock: Clock
    random: Random
    new_id: Callable[[str], str]
    consumer: str  # this process's name in consumer groups; the same after a restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The service, ready to be run."""

    app: FastAPI
    servicer: RolloutServicer
    workers: Mapping[str, Worker]
    follower: RunFollower
    reconciler: Reconciler
    close: Callable[[], Awaitable[None]]  # after the last call and worker, before any connection is closed

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service's gRPC methods to a server."""
        add_RolloutServiceServicer_to_server(self.servicer, server)  # type: ignore[no-untyped-call]


def assemble(settings: RolloutSettings, seams: Seams) -> Service:
    """Every part, joined: one long list, so that who gets what is read in one place."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    registry.register(EngineCollector(seams.pool))
    clock, queue, pool, chat = seams.clock, seams.queue, seams.pool, seams.chat

    suites = SuiteStore(seams.database)
    episodes = EpisodeStore(seams.database)
    evaluations = EvaluationStore(seams.database)
    demonstrations = DemonstrationStore(seams.database)
    shelf = TaskShelf(suites)

    catalogue = ToolCatalogue(seams.reward, clock=clock)
    capacity = Capacity(settings.max_episodes)
    runner = EpisodeRunner(
        store=episodes,
        queue=queue,
        sandboxes=RemoteSandboxes(
            seams.reward,
            clock=clock,
            call_deadline_s=settings.tool_timeout_s,
            session_wall_s=settings.attempt_deadline_s,
        ),
        catalogue=catalogue,
        chat=chat,
        clock=clock,
        random=seams.random,
        retry=Retry(max_failures=settings.max_failures, attempt_deadline_s=settings.attempt_deadline_s),
        metrics=metrics,
    )
    publisher = WeightPublisher(
        pool, clock=clock, save=ServingStore(seams.database).save, on_takeover=runner.interrupt_run
    )
    jobs = JobMaker(
        pool=pool,
        chat=chat,
        context_length=seams.context_length,
        wall_s=settings.episode_wall_s,
        turn_timeout_s=settings.turn_timeout_s,
    )
    follower = RunFollower(
        trainer=seams.trainer,
        pool=pool,
        healer=WeightHealer(
            trainer=seams.trainer,
            pool=pool,
            publisher=publisher,
            clock=clock,
            patience_s=settings.heal_after_s,
        ),
        suites=suites,
        episodes=episodes,
        shelf=shelf,
        runner=runner,
        jobs=jobs,
        capacity=capacity,
        metrics=metrics,
        clock=clock,
        new_id=seams.new_id,
        poll_interval_s=settings.poll_interval_s,
    )
    evaluation_player = EvaluationPlayer(
        store=evaluations,
        suites=suites,
        episodes=episodes,
        shelf=shelf,
        pool=pool,
        runner=runner,
        jobs=jobs,
        capacity=capacity,
        metrics=metrics,
        clock=clock,
        new_id=seams.new_id,
    )
    demonstration_player = DemonstrationPlayer(
        store=demonstrations,
        suites=suites,
        episodes=episodes,
        shelf=shelf,
        runner=runner,
        jobs=jobs,
        capacity=capacity,
        metrics=metrics,
        clock=clock,
    )
    admitter = Admitter(
        store=suites,
        admissions=Admissions(seams.reward),
        metrics=metrics,
        clock=clock,
        num_at_once=settings.admissions_at_once,
    )
    grades = GradeTaker(queue=queue, store=episodes, metrics=metrics, clock=clock, consumer=seams.consumer)
    reconciler = Reconciler(
        store=episodes,
        shelf=shelf,
        queue=queue,
        runner=runner,
        follower=follower,
        chat=chat,
        metrics=metrics,
        clock=clock,
        overdue_after_s=settings.regrade_after_s,
        stalled_after_s=settings.stalled_after_s,
    )
    keeper = EngineKeeper(pool, publisher, stored=seams.stored)

    async def close() -> None:
        await runner.flush_sent()  # what ended after the reconciler's last round
        await publisher.close()

    app = create_app(
        title="Practicum rollout service",
        description=DESCRIPTION,
        token=settings.keyring,
        routers=[
            suite_router(
                store=suites, catalogue=catalogue, admitter=admitter, clock=clock, new_id=seams.new_id
            ),
            episode_router(store=episodes, reconciler=reconciler),
            evaluation_router(store=evaluations, player=evaluation_player, clock=clock),
            demonstration_router(
                store=demonstrations,
                suites=suites,
                player=demonstration_player,
                trainer=seams.trainer,
                clock=clock,
                new_id=seams.new_id,
            ),
            engine_router(pool=pool),
        ],
        readiness=_readiness(seams, catalogue),
        registry=registry,
    )
    return Service(
        app=app,
        servicer=RolloutServicer(
            pool=pool, publisher=publisher, follower=follower, trainer=seams.trainer, suites=suites
        ),
        workers={
            "engines": keeper.run,
            "episodes": runner.drain,
            "runs": follower.run,
            "evaluations": evaluation_player.run,
            "demonstrations": demonstration_player.run,
            "admission": admitter.run,
            "grades": grades.run,
            "reconciler": reconciler.run,
        },
        follower=follower,
        reconciler=reconciler,
        close=close,
    )


def _readiness(seams: Seams, catalogue: ToolCatalogue) -> Mapping[str, Callable[[], Awaitable[None]]]:
    async def database() -> None:
        await db.check(seams.database)

    async def engines() -> None:
        if not any(engine.is_routable for engine in seams.pool.engines):
            raise EngineError("no engine can be used")

    async def reward() -> None:
        await catalogue.tools()

    return {"database": database, "queue": seams.queue.ping, "engines": engines, "reward": reward}
