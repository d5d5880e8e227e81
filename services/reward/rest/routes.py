"""The reward service's routes."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Query

from practicum.auth.scopes import Scope
from practicum.errors import InvalidInput
from practicum.ids import new_id
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.models import Page
from practicum.rest.paging import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, decode_page_token, encode_page_token
from practicum.trajectory import Outcome
from services.reward.graders.base import GraderSpec, Task
from services.reward.grading import Grading
from services.reward.rest.models import (
    CapabilitiesBody,
    GradeBody,
    GradeRequestBody,
    StoredGradeBody,
    grade_fields,
    stored_grade_body,
)
from services.reward.sandbox.base import Changes, File, Sandbox
from services.reward.sandbox.limits import SandboxLimits
from services.reward.sandbox.self_check import Finding
from services.reward.sessions.registry import SessionRegistry
from services.reward.store.grades import GradeStore


def grades_router(store: GradeStore, grading: Grading, defaults: SandboxLimits) -> APIRouter:
    """Routes of grades."""
    router = APIRouter(prefix="/v1/grades", tags=["grades"], route_class=ScopedRoute)

    @router.get(
        "", dependencies=[needs(Scope.SUBMIT)], summary="Grades in the order in which they were given"
    )
    async def list_grades(
        run_id: Annotated[str | None, Query(description="Only grades of this run.")] = None,
        page_size: Annotated[
            int, Query(ge=1, le=MAX_PAGE_SIZE, description="Items a page.")
        ] = DEFAULT_PAGE_SIZE,
        page_token: Annotated[str | None, Query(description="From the page before.")] = None,
    ) -> Page[StoredGradeBody]:
        """Each with its components, tests and evidence."""
        after = decode_page_token(page_token) if page_token else None
        found = await store.page(run_id=run_id, after=after, limit=page_size + 1)
        items = [stored_grade_body(stored) for stored in found[:page_size]]
        more = len(found) > page_size
        last = found[page_size - 1] if more else None
        token = encode_page_token(last.created_at, last.trajectory_id) if last else None
        return Page[StoredGradeBody](items=items, next_page_token=token)

    @router.get("/{trajectory_id}", dependencies=[needs(Scope.SUBMIT)], summary="The grade of a trajectory")
    async def get_grade(
        trajectory_id: Annotated[str, Path(description="The trajectory.", examples=["ep_0197f0c2-1"])],
    ) -> StoredGradeBody:
        """404 where it was not graded yet."""
        return stored_grade_body(await store.get(trajectory_id))

    @router.post(
        "", dependencies=[needs(Scope.SUBMIT)], summary="Grade a workspace now; the answer is not stored"
    )
    async def grade_now(body: GradeRequestBody) -> GradeBody:
        """As an episode is graded: in a clean sandbox, with only the changes that `editable` lets count."""
        task = Task(
            task_id="ad-hoc",
            workspace=_files(body.workspace.files),
            tools=(),
            grader=GraderSpec(
                kind=body.grader.kind,
                files=_files(body.grader.files),
                editable=tuple(body.grader.editable),
                timeout_s=body.grader.timeout_s,
            ),
            limits=defaults,
        )
        changes = Changes(changed=_files(body.changed), removed=tuple(body.removed))
        graded = await grading.grade(new_id("adhoc"), task, changes, Outcome.COMPLETED)
        return GradeBody.model_validate(grade_fields(graded.grade, graded.outcome))

    return router


def sandbox_router(
    sandbox: Sandbox, findings: Mapping[str, Finding], sessions: SessionRegistry, max_sessions: int
) -> APIRouter:
    """What the sandbox is."""
    router = APIRouter(prefix="/v1/sandbox", tags=["sandbox"], route_class=ScopedRoute)

    @router.get("/capabilities", dependencies=[needs(Scope.OPERATE)], summary="What the sandbox enforces")
    async def capabilities() -> CapabilitiesBody:
        """Also what the self-attack met at boot, and how many sessions are open."""
        return CapabilitiesBody(
            capabilities=dict(sandbox.capabilities()),
            attacks={name: finding.detail for name, finding in findings.items()},
            open_sessions=sessions.num_open,
            max_sessions=max_sessions,
        )

    return router


def _files(texts: Mapping[str, str]) -> tuple[File, ...]:
    files = []
    for path, text in texts.items():
        try:
            files.append(File(path=path, content=text.encode()))
        except UnicodeEncodeError as error:
            raise InvalidInput(path, "holds half a character (a lone surrogate)") from error
    return tuple(files)
