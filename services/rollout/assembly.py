"""Puts the parts of the service together, whatever stands behind the seams.

    rest, rpc ──► scheduler (follower, evaluations, demonstrations, admission, grades, reconciler)
                      │──► runner ──► episode loop ──► engine pool, sandboxes (reward service)
                      └──► store (SQL), queue (Redis Streams)

No part refers back to this module. It makes no connection and reads no environment: `main` does.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
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
from services.rollout.engine.labels import LabelBook
from services.rollout.engine.pool import Engine, EnginePool
from services.rollout.engine.weights import WeightPublisher
from services.rollout.metrics import EngineCollector, Metrics
from services.rollout.rest.episodes import episode_router
from services.rollout.rest.suites import suite_router
from services.rollout.rest.work import demonstration_router, engine_router, evaluation_router
from services.rollout.rpc.sandboxes import Admissions, Dial, RemoteSandboxes, ToolCatalogue
from services.rollout.rpc.servicer import RolloutServicer
from services.rollout.scheduler.admission import Admitter
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.claiming import Claimer
from services.rollout.scheduler.demonstrations import DemonstrationPlayer
from services.rollout.scheduler.evaluations import EvaluationPlayer
from services.rollout.scheduler.follower import RunFollower
from services.rollout.scheduler.grades import GradeTaker
from services.rollout.scheduler.healing import WeightHealer
from services.rollout.scheduler.jobs import JobMaker
from services.rollout.scheduler.membership import Membership
from services.rollout.scheduler.reconciler import Reconciler
from services.rollout.scheduler.runner import EpisodeRunner, Retry
from services.rollout.scheduler.runs import Trainer
from services.rollout.scheduler.selection import TaskShelf
from services.rollout.settings import RolloutSettings
from services.rollout.store.claims import ClaimStore
from services.rollout.store.demonstrations import DemonstrationStore
from services.rollout.store.episodes import EpisodeStore
from services.rollout.store.evaluations import EvaluationStore
from services.rollout.store.replicas import ReplicaStore
from services.rollout.store.suites import SuiteStore
from services.rollout.store.weights import WeightStore

DESCRIPTION = "Turns tasks into trajectories: suites, episodes, evaluations, demonstrations and engines."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What stands around the service."""

    database: AsyncEngine
    queue: Queue
    reward: grpc.aio.Channel
    dial: Dial  # a channel to one replica of the reward service
    trainer: Trainer
    engines: Sequence[Engine]
    chat: ChatTemplate
    context_length: int
    clock: Clock
    random: Random
    new_id: Callable[[str], str]
    route_wait_s: float = 120.0  # how long a request waits for an engine that may be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The service, ready to be run."""

    app: FastAPI
    servicer: RolloutServicer
    workers: Mapping[str, Worker]
    follower: RunFollower
    reconciler: Reconciler
    pool: EnginePool
    membership: Membership  # to be kept for as long as anything here runs
    close: Callable[[], Awaitable[None]]  # after the last call and worker, before any connection is closed

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service's gRPC methods to a server."""
        add_RolloutServiceServicer_to_server(self.servicer, server)  # type: ignore[no-untyped-call]


def assemble(settings: RolloutSettings, seams: Seams) -> Service:
    """Every part, joined: one long list, so that who gets what is read in one place."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    clock, queue, chat = seams.clock, seams.queue, seams.chat
    instance = settings.rollout_instance

    records = WeightStore(seams.database)
    labels = LabelBook(records.find, clock=clock)
    pool = EnginePool(seams.engines, labels=labels, clock=clock, route_wait_s=seams.route_wait_s)
    registry.register(EngineCollector(pool))
    suites = SuiteStore(seams.database)
    episodes = EpisodeStore(seams.database, instance)
    claims = ClaimStore(seams.database, instance)
    evaluations = EvaluationStore(seams.database)
    demonstrations = DemonstrationStore(seams.database)
    shelf = TaskShelf(suites)

    catalogue = ToolCatalogue(seams.reward, clock=clock)
    membership = Membership(
        ReplicaStore(seams.database),
        instance=instance,
        life=seams.new_id("life"),
        clock=clock,
        interval_s=settings.beat_interval_s,
        lost_after_s=settings.lost_after_s,
    )
    capacity = Capacity(settings.max_episodes)
    sandboxes = RemoteSandboxes(
        seams.reward,
        dial=seams.dial,
        clock=clock,
        call_deadline_s=settings.tool_timeout_s,
        session_wall_s=settings.attempt_deadline_s,
    )
    runner = EpisodeRunner(
        store=episodes,
        claims=claims,
        queue=queue,
        sandboxes=sandboxes,
        catalogue=catalogue,
        chat=chat,
        clock=clock,
        random=seams.random,
        retry=Retry(max_failures=settings.max_failures, attempt_deadline_s=settings.attempt_deadline_s),
        metrics=metrics,
    )
    claimer = Claimer(store=claims, capacity=capacity, runner=runner, membership=membership, clock=clock)
    publisher = WeightPublisher(
        pool,
        records=records,
        instance=instance,
        clock=clock,
        is_first=lambda: membership.came_first,
        on_takeover=runner.interrupt_run,
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
        claims=claims,
        membership=membership,
        publisher=publisher,
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
        shelf=shelf,
        pool=pool,
        runner=runner,
        jobs=jobs,
        capacity=capacity,
        claimer=claimer,
        metrics=metrics,
        clock=clock,
        new_id=seams.new_id,
    )
    demonstration_player = DemonstrationPlayer(
        store=demonstrations,
        episodes=episodes,
        suites=suites,
        shelf=shelf,
        runner=runner,
        jobs=jobs,
        capacity=capacity,
        claimer=claimer,
        metrics=metrics,
        clock=clock,
    )
    admitter = Admitter(
        store=suites,
        admissions=Admissions(seams.reward),
        metrics=metrics,
        clock=clock,
        instance=instance,
        num_at_once=settings.admissions_at_once,
    )
    grades = GradeTaker(queue=queue, store=episodes, metrics=metrics, clock=clock, consumer=instance)
    reconciler = Reconciler(
        store=episodes,
        shelf=shelf,
        queue=queue,
        runner=runner,
        follower=follower,
        membership=membership,
        chat=chat,
        metrics=metrics,
        clock=clock,
        overdue_after_s=settings.regrade_after_s,
        stalled_after_s=settings.stalled_after_s,
    )
    membership.on_change.append(follower.look_for_unowned)
    membership.on_lost.append(runner.interrupt_all)
    keeper = EngineKeeper(pool, publisher)
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
        readiness=_readiness(seams, pool, catalogue),
        registry=registry,
    )

    async def close() -> None:
        async with AsyncExitStack() as steps:  # the last first, whatever becomes of one
            steps.push_async_callback(sandboxes.close)
            steps.push_async_callback(membership.leave)
            steps.push_async_callback(publisher.close)
            steps.push_async_callback(runner.flush_sent)  # what ended after the reconciler's last round

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
        membership=membership,
        pool=pool,
        close=close,
    )


def _readiness(
    seams: Seams, pool: EnginePool, catalogue: ToolCatalogue
) -> Mapping[str, Callable[[], Awaitable[None]]]:
    async def database() -> None:
        await db.check(seams.database)

    async def engines() -> None:
        if not any(engine.is_routable for engine in pool.engines):
            raise EngineError("no engine can be used")

    async def reward() -> None:
        await catalogue.tools()

    return {"database": database, "queue": seams.queue.ping, "engines": engines, "reward": reward}
