"""Suites and tasks over REST."""

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Response

from practicum.auth.scopes import Scope
from practicum.clock import Clock
from practicum.errors import InvalidInput, NotFound
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.idempotency import body_digest, check_key
from practicum.rest.models import ApiModel, Page
from practicum.rest.paging import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, decode_page_token, encode_page_token
from services.rollout.rest.models import (
    AdmissionMode,
    SuiteRequest,
    SuiteView,
    TaskCounts,
    TaskModel,
    TaskRequest,
    TaskView,
)
from services.rollout.rpc.sandboxes import ToolCatalogue
from services.rollout.rpc.taskspec import reference_bytes, task_spec_bytes, task_summary
from services.rollout.scheduler.admission import Admitter
from services.rollout.store.suites import Creation, Suite, SuiteStore
from services.rollout.tasks import Split, Task, TaskState

PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE, description="Items a page.")]
PageToken = Annotated[str | None, Query(description="next_page_token of the page before.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Repeating a request with the same key and body answers as the first did and makes "
        "nothing new.",
        examples=["first-bugs-2026-01-02"],
    ),
]


def suite_router(
    *,
    store: SuiteStore,
    catalogue: ToolCatalogue,
    admitter: Admitter,
    clock: Clock,
    new_id: Callable[[str], str],
) -> APIRouter:
    """The routes of suites and tasks."""
    router = APIRouter(prefix="/v1", tags=["tasks"], route_class=ScopedRoute)

    @router.post(
        "/suites",
        dependencies=[needs(Scope.SUBMIT)],
        status_code=201,
        response_model=SuiteView,
        response_description="The suite, stored now.",
        responses={200: {"model": SuiteView, "description": "The same suite was stored before; here it is."}},
        summary="Store a suite with its tasks",
    )
    async def create_suite(body: SuiteRequest, idempotency_key: IdempotencyKey = None) -> Response:
        """All tasks are stored, or none. Posting the same suite again answers with the stored one."""
        digest = body_digest(body)
        existing = await store.find_exact(body.name, body.version)
        if existing is not None and existing.body_digest == digest:
            return _json((await _suite_views(store, [existing]))[0], status=200)
        await _check_tools([(f"tasks[{index}].", task) for index, task in enumerate(body.tasks)], catalogue)
        suite = Suite(
            suite_id=new_id("suite"),
            name=body.name,
            version=body.version,
            body_digest=digest,
            created_at=clock.now(),
        )
        members = [
            make_task(task, suite.suite_id, position, body.admission, new_id("task"))
            for position, task in enumerate(body.tasks)
        ]
        view = _view(suite, _counts_of(members))
        creation = Creation(
            key=check_key(idempotency_key),
            body_digest=digest,
            response_json=view.model_dump_json(),
            now=suite.created_at,
        )
        answer = await store.add_suite(suite, members, creation)
        admitter.wake.set()
        return Response(answer, status_code=201, media_type="application/json")

    @router.get("/suites", dependencies=[needs(Scope.SUBMIT)], summary="Suites, oldest first")
    async def list_suites(
        page_size: PageSize = DEFAULT_PAGE_SIZE, page_token: PageToken = None
    ) -> Page[SuiteView]:
        """Each with its numbers of tasks by split and state."""
        after = decode_page_token(page_token) if page_token else None
        found = await store.list_suites(after=after, limit=page_size + 1)
        more, found = len(found) > page_size, found[:page_size]
        token = encode_page_token(found[-1].created_at, found[-1].suite_id) if more else None
        return Page(items=await _suite_views(store, found), next_page_token=token)

    @router.get("/suites/{suite}", dependencies=[needs(Scope.SUBMIT)], summary="One suite")
    async def get_suite(suite: Annotated[str, Path(description="Id, name, or name@version.")]) -> SuiteView:
        """With its numbers of tasks by split and state."""
        found = await store.find(suite)
        if found is None:
            raise NotFound(f"suite {suite}")
        return (await _suite_views(store, [found]))[0]

    @router.post(
        "/tasks",
        dependencies=[needs(Scope.SUBMIT)],
        status_code=201,
        response_model=TaskView,
        summary="Add a task to a suite",
    )
    async def create_task(body: TaskRequest, idempotency_key: IdempotencyKey = None) -> Response:
        """The task is stored at once and admitted in the background."""
        key = check_key(idempotency_key)
        suite = await store.require(body.suite, field="suite")
        await _check_tools([("", body)], catalogue)
        task = make_task(body, suite.suite_id, 0, body.admission, new_id("task"))
        creation = Creation(
            key=key,
            body_digest=body_digest(body),
            response_json=task_view(task).model_dump_json(),
            now=clock.now(),
        )
        answer = await store.add_task(task, creation)
        admitter.wake.set()
        return Response(answer, status_code=201, media_type="application/json")

    @router.get("/tasks/{task_id}", dependencies=[needs(Scope.SUBMIT)], summary="One task")
    async def get_task(task_id: Annotated[str, Path(description="The task.")]) -> TaskView:
        """Its state and, once it has a verdict, the reasons."""
        return task_view(await store.get_task(task_id))

    @router.get("/tasks", dependencies=[needs(Scope.SUBMIT)], summary="Tasks, oldest first")
    async def list_tasks(
        suite: Annotated[str | None, Query(description="Id, name, or name@version.")] = None,
        split: Annotated[Split | None, Query(description="Only tasks of this split.")] = None,
        state: Annotated[TaskState | None, Query(description="Only tasks in this state.")] = None,
        page_size: PageSize = DEFAULT_PAGE_SIZE,
        page_token: PageToken = None,
    ) -> Page[TaskView]:
        """Filters join by and."""
        suite_id = (await store.require(suite, field="suite")).suite_id if suite is not None else None
        after = decode_page_token(page_token) if page_token else None
        found = await store.list_tasks(
            suite_id=suite_id, split=split, state=state, after=after, limit=page_size + 1
        )
        more, found = len(found) > page_size, found[:page_size]
        token = encode_page_token(found[-1][1], found[-1][0].task_id) if more else None
        return Page(items=[task_view(task) for task, _ in found], next_page_token=token)

    return router


def make_task(model: TaskModel, suite_id: str, position: int, admission: AdmissionMode, task_id: str) -> Task:
    """A stored task from a caller's."""
    grading, limits, solution = model.grading(), model.sandbox_limits(), model.solution()
    return Task(
        task_id=task_id,
        suite_id=suite_id,
        position=position,
        name=model.name,
        split=model.split,
        instruction=model.instruction,
        tools=tuple(model.tools),
        tags=tuple(model.tags),
        session_wall_s=limits.session_wall_s,
        spec=task_spec_bytes(
            task_id=task_id,
            files=model.workspace.as_files(),
            tools=model.tools,
            grading=grading,
            limits=limits,
        ),
        reference=None if solution is None else reference_bytes(solution),
        state=TaskState.ADMITTED if admission is AdmissionMode.SKIP else TaskState.ADMITTING,
    )


def task_view(task: Task) -> TaskView:
    """A task as callers see it."""
    summary = task_summary(task.spec)
    return TaskView(
        task_id=task.task_id,
        suite_id=task.suite_id,
        name=task.name,
        split=task.split,
        instruction=task.instruction,
        files=list(summary.files),
        tools=list(task.tools),
        grader=summary.grader,
        editable=list(summary.editable),
        tags=list(task.tags),
        state=task.state,
        reasons=[dict(reason) for reason in task.reasons],
    )


async def _check_tools(tasks: Sequence[tuple[str, TaskModel]], catalogue: ToolCatalogue) -> None:
    known = await catalogue.tools()
    for where, task in tasks:
        for index, name in enumerate(task.tools):
            if name not in known:
                raise InvalidInput(
                    f"{where}tools[{index}]",
                    f"there is no tool {name!r}; the tools are {', '.join(sorted(known))}",
                )


Counts = dict[tuple[Split, TaskState], int]


def _counts_of(members: Sequence[Task]) -> Counts:
    counts: Counts = {}
    for task in members:
        counts[task.split, task.state] = counts.get((task.split, task.state), 0) + 1
    return counts


async def _suite_views(store: SuiteStore, found: Sequence[Suite]) -> list[SuiteView]:
    counts = await store.counts([suite.suite_id for suite in found])
    return [_view(suite, counts[suite.suite_id]) for suite in found]


def _view(suite: Suite, counts: Counts) -> SuiteView:
    by_split = {
        split: TaskCounts(**{str(state): counts.get((split, state), 0) for state in TaskState})
        for split in Split
    }
    return SuiteView(
        suite_id=suite.suite_id,
        name=suite.name,
        version=suite.version,
        created_at=suite.created_at,
        train=by_split[Split.TRAIN],
        heldout=by_split[Split.HELDOUT],
        ready=not any(split.admitting for split in by_split.values()),
    )


def _json(model: ApiModel, *, status: int) -> Response:
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")
