"""The trainer's routes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, status

from practicum.auth.scopes import Scope
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.idempotency import body_digest, check_key
from practicum.rest.models import Page
from practicum.rest.paging import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, decode_page_token, encode_page_token
from services.trainer.progress import ProgressBoard
from services.trainer.rest.models import CheckpointBody, QuarantineBody, RunBody, RunRequest, RunSummary
from services.trainer.rest.translate import checkpoint_body, quarantine_body, run_body, run_summary, spec_of
from services.trainer.spec import RunState
from services.trainer.store import TrainerStore
from services.trainer.store.records import Cursor, RunRecord

RunId = Annotated[str, Path(description="The run.", examples=["run_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"])]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE, description="Items a page.")]
PageToken = Annotated[str | None, Query(description="next_page_token of the page before.")]
LastSteps = Annotated[int, Query(ge=0, le=10_000, description="Steps shown, newest ones; 0 for none.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Repeating a request with the same key and body makes no second run.",
        examples=["first-bugs-rl-2026-01-02"],
    ),
]


CheckSuite = Callable[[str], Awaitable[None]]
"""Raises `InvalidInput` where a run could never sample from a suite, `RpcUnavailable` where nobody knows."""


def runs_router(
    store: TrainerStore,
    progress: ProgressBoard,
    wake: Callable[[], None],
    *,
    check_suite: CheckSuite | None = None,
) -> APIRouter:
    """Routes of runs; `wake` tells the worker that there may be something to do.

    `check_suite` judges the suite of a run; None = there is no rollout service to ask.
    """
    router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=ScopedRoute)

    async def body(run: RunRecord, last_steps: int) -> RunBody:
        steps = await store.runs.steps(run.run_id, last=last_steps)
        counts = await store.quarantine.count([run.run_id])
        return run_body(run, steps, quarantined=counts[run.run_id], progress=progress)

    @router.post(
        "", dependencies=[needs(Scope.OPERATE)], status_code=status.HTTP_201_CREATED, summary="Make a run"
    )
    async def create_run(request: RunRequest, idempotency_key: IdempotencyKey = None) -> RunBody:
        """It trains when the runs before it are done.

        Contradictory options, a model that cannot be trained and a suite that cannot be sampled answer 422
        with the field; 503 where the rollout service, which knows the suites, is away.
        """
        key = check_key(idempotency_key)
        spec = spec_of(request)
        if spec.rollout is not None and check_suite is not None:
            await check_suite(spec.rollout.suite)
        run = await store.runs.create(spec, key=key, digest=body_digest(request))
        wake()
        return await body(run, 0)

    @router.get("", dependencies=[needs(Scope.OPERATE)], summary="List runs, oldest first")
    async def list_runs(
        page_size: PageSize = DEFAULT_PAGE_SIZE,
        page_token: PageToken = None,
        state: Annotated[RunState | None, Query(description="Only runs in this state.")] = None,
    ) -> Page[RunSummary]:
        """Without their steps; GET a run for those."""
        runs = await store.runs.page(limit=page_size + 1, after=_cursor(page_token), state=state)
        counts = await store.quarantine.count([run.run_id for run in runs])
        items = [
            run_summary(run, quarantined=counts[run.run_id], progress=progress) for run in runs[:page_size]
        ]
        return Page(
            items=items,
            next_page_token=_next_token(page_size, [(run.created_at, run.run_id) for run in runs]),
        )

    @router.get("/{run_id}", dependencies=[needs(Scope.OPERATE)], summary="A run with its steps")
    async def get_run(run_id: RunId, last_steps: LastSteps = 1000) -> RunBody:
        """Where it stands, what it is doing, and its newest steps."""
        return await body(await store.runs.get(run_id), last_steps)

    @router.post(
        "/{run_id}:pause", dependencies=[needs(Scope.OPERATE)], summary="Hold a run; it keeps its place"
    )
    async def pause_run(run_id: RunId) -> RunBody:
        """A step that is being computed is still committed. 409 where the run is over."""
        run = await store.runs.change_state(
            run_id,
            RunState.PAUSED,
            allowed={RunState.PENDING, RunState.RUNNING},
            already={RunState.PAUSED},
        )
        return await body(run, 0)

    @router.post("/{run_id}:resume", dependencies=[needs(Scope.OPERATE)], summary="Let a held run go on")
    async def resume_run(run_id: RunId) -> RunBody:
        """It is pending until the trainer is free, ahead of every run made after it. 409 where it is over."""
        run = await store.runs.change_state(
            run_id,
            RunState.PENDING,
            allowed={RunState.PAUSED},
            already={RunState.PENDING, RunState.RUNNING},
        )
        wake()
        return await body(run, 0)

    @router.post("/{run_id}:stop", dependencies=[needs(Scope.OPERATE)], summary="End a run for good")
    async def stop_run(run_id: RunId) -> RunBody:
        """A step that is being computed is dropped. Committed checkpoints stay. 409 where the run is over."""
        run = await store.runs.change_state(
            run_id, RunState.STOPPED, allowed={RunState.PENDING, RunState.RUNNING, RunState.PAUSED}
        )
        return await body(run, 0)

    @router.get(
        "/{run_id}/quarantine",
        dependencies=[needs(Scope.OPERATE)],
        summary="Trajectories that were set aside, oldest first",
    )
    async def list_quarantine(
        run_id: RunId, page_size: PageSize = DEFAULT_PAGE_SIZE, page_token: PageToken = None
    ) -> Page[QuarantineBody]:
        """Each with the invariant it broke; none of them was trained."""
        await store.runs.get(run_id)
        records = await store.quarantine.page(run_id, limit=page_size + 1, after=_cursor(page_token))
        return Page(
            items=[quarantine_body(record) for record in records[:page_size]],
            next_page_token=_next_token(
                page_size, [(record.created_at, record.quarantine_id) for record in records]
            ),
        )

    return router


def checkpoints_router(store: TrainerStore) -> APIRouter:
    """Routes of checkpoints."""
    router = APIRouter(prefix="/v1/checkpoints", tags=["checkpoints"], route_class=ScopedRoute)

    @router.get("", dependencies=[needs(Scope.OPERATE)], summary="List committed checkpoints, newest first")
    async def list_checkpoints(
        page_size: PageSize = DEFAULT_PAGE_SIZE,
        page_token: PageToken = None,
        run_id: Annotated[str | None, Query(description="Only checkpoints of this run.")] = None,
    ) -> Page[CheckpointBody]:
        """Retired ones too: their folders are gone, their records stay."""
        found = await store.checkpoints.page(limit=page_size + 1, after=_cursor(page_token), run_id=run_id)
        return Page(
            items=[checkpoint_body(checkpoint) for checkpoint in found[:page_size]],
            next_page_token=_next_token(
                page_size, [(checkpoint.created_at, checkpoint.checkpoint_id) for checkpoint in found]
            ),
        )

    @router.get("/{checkpoint_id}", dependencies=[needs(Scope.OPERATE)], summary="A committed checkpoint")
    async def get_checkpoint(
        checkpoint_id: Annotated[str, Path(description="The checkpoint.")],
    ) -> CheckpointBody:
        """Its folder, its manifest's hash and its size."""
        return checkpoint_body(await store.checkpoints.by_id(checkpoint_id))

    return router


def _cursor(page_token: str | None) -> Cursor | None:
    if page_token is None:
        return None
    created_at, row_id = decode_page_token(page_token)
    return Cursor(created_at=created_at, row_id=row_id)


def _next_token(page_size: int, keys: Sequence[tuple[object, str]]) -> str | None:
    """The token after the last row shown; None where no row follows it."""
    if len(keys) <= page_size:
        return None
    created_at, row_id = keys[page_size - 1]
    return encode_page_token(created_at, row_id)  # type: ignore[arg-type]
