"""Evaluations, demonstrations and engines over REST."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Response

from practicum.auth.scopes import Scope
from practicum.clock import Clock
from practicum.errors import Conflict, InvalidInput, NotFound
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.idempotency import body_digest, check_key
from services.rollout.engine.pool import Engine, EnginePool
from services.rollout.rest.models import (
    DemonstrationsCreated,
    DemonstrationsRequest,
    DemonstrationsView,
    EnginesView,
    EngineView,
    EvaluationCreated,
    EvaluationRequest,
    EvaluationView,
)
from services.rollout.rest.suites import IdempotencyKey
from services.rollout.scheduler.demonstrations import DemonstrationPlayer
from services.rollout.scheduler.evaluations import EvaluationPlayer
from services.rollout.scheduler.runs import Trainer
from services.rollout.store.demonstrations import DemonstrationSet, DemonstrationState, DemonstrationStore
from services.rollout.store.episodes import EpisodeState, NewEpisode
from services.rollout.store.evaluations import EvaluationStore
from services.rollout.store.suites import Creation, SuiteStore
from services.rollout.tasks import TaskState
from services.rollout.wilson import wilson_interval


def evaluation_router(*, store: EvaluationStore, player: EvaluationPlayer, clock: Clock) -> APIRouter:
    """The routes of evaluations."""
    router = APIRouter(prefix="/v1", tags=["evaluations"], route_class=ScopedRoute)

    @router.post(
        "/evaluations",
        dependencies=[needs(Scope.SUBMIT)],
        status_code=202,
        response_model=EvaluationCreated,
        summary="Evaluate the weights served now",
    )
    async def create_evaluation(body: EvaluationRequest, idempotency_key: IdempotencyKey = None) -> Response:
        """The tasks are drawn from the split by the seed; ask for the result by the id."""
        key = check_key(idempotency_key)

        def creation_of(evaluation_id: str) -> Creation:
            return Creation(
                key=key,
                body_digest=body_digest(body),
                response_json=EvaluationCreated(evaluation_id=evaluation_id).model_dump_json(),
                now=clock.now(),
            )

        answer = await player.submit(body.model_dump(mode="json"), creation_of)
        return Response(answer, status_code=202, media_type="application/json")

    @router.get("/evaluations/{evaluation_id}", dependencies=[needs(Scope.SUBMIT)], summary="One evaluation")
    async def get_evaluation(
        evaluation_id: Annotated[str, Path(description="The evaluation.")],
    ) -> EvaluationView:
        """Sums over the episodes that have ended."""
        evaluation = await store.get(evaluation_id)
        tally = await store.tally(evaluation_id)
        low = high = rate = None
        if tally.num_graded:
            rate = tally.num_passed / tally.num_graded
            low, high = wilson_interval(tally.num_passed, tally.num_graded)
        return EvaluationView(
            evaluation_id=evaluation_id,
            state=evaluation.state,
            suite_id=evaluation.suite_id,
            request=dict(evaluation.request),
            num_episodes=tally.num_episodes,
            num_done=tally.num_done,
            num_passed=tally.num_passed,
            infra_failed=tally.num_infra_failed,
            success_rate=rate,
            wilson_low=low,
            wilson_high=high,
            mean_turns=tally.mean_turns,
            tokens_generated=tally.tokens_generated,
            weight_version=evaluation.weight_version,
            engine_utilisation=evaluation.engine_utilisation,
            seconds=((evaluation.finished_at or clock.now()) - evaluation.created_at).total_seconds(),
            created_at=evaluation.created_at,
        )

    return router


def demonstration_router(
    *,
    store: DemonstrationStore,
    suites: SuiteStore,
    player: DemonstrationPlayer,
    trainer: Trainer,
    clock: Clock,
    new_id: Callable[[str], str],
) -> APIRouter:
    """The routes of demonstrations."""
    router = APIRouter(prefix="/v1", tags=["demonstrations"], route_class=ScopedRoute)

    @router.post(
        "/demonstrations",
        dependencies=[needs(Scope.SUBMIT)],
        status_code=202,
        response_model=DemonstrationsCreated,
        summary="Play scripted episodes for a run",
    )
    async def create(body: DemonstrationsRequest, idempotency_key: IdempotencyKey = None) -> Response:
        """They are played in real sandboxes and sent to the run's trainer as they end, without a grade."""
        key = check_key(idempotency_key)
        player.check_room()
        try:
            state = await trainer.state_of(body.run_id)
        except NotFound as error:
            raise InvalidInput("run_id", f"there is no run {body.run_id!r}") from error
        if state.is_over:
            raise Conflict(f"run {body.run_id} is {state}")
        task_ids = await _task_ids(body, suites)
        demonstration = DemonstrationSet(
            demonstration_id=new_id("demo"),
            run_id=body.run_id,
            state=DemonstrationState.RUNNING,
            created_at=clock.now(),
            finished_at=None,
        )
        members = [
            _episode(new_id("ep"), task_id, demonstration, position)
            for position, task_id in enumerate(task_ids)
        ]
        created = DemonstrationsCreated(
            demonstration_id=demonstration.demonstration_id, num_episodes=len(members)
        )
        answer = await store.create(
            demonstration,
            [tuple(turn.as_turn() for turn in item.turns) for item in body.demonstrations],
            members,
            Creation(
                key=key,
                body_digest=body_digest(body),
                response_json=created.model_dump_json(),
                now=demonstration.created_at,
            ),
        )
        stored = DemonstrationsCreated.model_validate_json(answer)
        if stored.demonstration_id == demonstration.demonstration_id:
            await player.begin(demonstration.demonstration_id)
        return Response(answer, status_code=202, media_type="application/json")

    @router.get(
        "/demonstrations/{demonstration_id}",
        dependencies=[needs(Scope.SUBMIT)],
        summary="How far a set of demonstrations is",
    )
    async def get(
        demonstration_id: Annotated[str, Path(description="The set of demonstrations.")],
    ) -> DemonstrationsView:
        """Numbers of its episodes."""
        demonstration = await store.get(demonstration_id)
        counts = await store.counts(demonstration_id)
        return DemonstrationsView(
            demonstration_id=demonstration_id,
            run_id=demonstration.run_id,
            state=demonstration.state,
            num_episodes=sum(counts.values()),
            num_done=counts.get(EpisodeState.RECORDED, 0),
            num_failed=counts.get(EpisodeState.INFRA_FAILED, 0) + counts.get(EpisodeState.CANCELLED, 0),
            created_at=demonstration.created_at,
        )

    return router


def engine_router(*, pool: EnginePool) -> APIRouter:
    """The routes of engines."""
    router = APIRouter(prefix="/v1", tags=["engines"], route_class=ScopedRoute)

    @router.get(
        "/engines",
        dependencies=[needs(Scope.OPERATE)],
        summary="Every engine, what it serves and how busy it is",
    )
    async def list_engines() -> EnginesView:
        """Utilisation counts from the service's start; take the difference of two readings for a span."""
        serving = pool.serving
        return EnginesView(
            run_id=serving.run_id if serving else "",
            weight_version=serving.weight_version if serving else 0,
            items=[_engine(engine) for engine in pool.engines],
        )

    return router


def _engine(engine: Engine) -> EngineView:
    usage = engine.meter.read()
    return EngineView(
        engine_id=engine.engine_id,
        url=engine.client.base_url,
        healthy=engine.is_routable,
        weight_version=engine.weight_version,
        slots=engine.num_slots,
        num_in_flight=engine.meter.num_in_flight,
        busy_slot_seconds=usage.busy_slot_seconds,
        seconds=usage.seconds,
        utilisation=usage.utilisation,
        tokens_generated=usage.tokens_generated,
        paused_seconds=usage.paused_seconds,
    )


async def _task_ids(body: DemonstrationsRequest, suites: SuiteStore) -> list[str]:
    suite_id = None
    if body.suite is not None:
        suite_id = (await suites.require(body.suite, field="suite")).suite_id
    found = await suites.find_by_names([item.task for item in body.demonstrations], suite_id)
    task_ids = []
    for index, item in enumerate(body.demonstrations):
        matches = [match for match in found.get(item.task, []) if match[1] is not TaskState.REJECTED]
        if not matches:
            detail = "was rejected at admission" if item.task in found else "does not exist"
            raise InvalidInput(f"demonstrations[{index}].task", f"task {item.task!r} {detail}")
        if len(matches) > 1:
            raise InvalidInput(
                f"demonstrations[{index}].task",
                f"{len(matches)} suites have a task {item.task!r}; give suite",
            )
        task_ids.append(matches[0][0])
    return task_ids


def _episode(episode_id: str, task_id: str, demonstration: DemonstrationSet, position: int) -> NewEpisode:
    return NewEpisode(
        episode_id=episode_id,
        task_id=task_id,
        run_id=demonstration.run_id,
        group_id=episode_id,
        group_index=position,
        group_size=1,
        position=position,
        demonstration_id=demonstration.demonstration_id,
    )
