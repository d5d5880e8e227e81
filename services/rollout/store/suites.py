"""Suites and their tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import reading, transaction
from practicum.errors import InvalidInput, NotFound
from services.rollout.store.once import create_once
from services.rollout.store.tables import suites, tasks
from services.rollout.tasks import Split, Task, TaskState

_INSERT_CHUNK = 200  # rows a statement: SQLite bounds the number of bound values


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A named, versioned set of tasks."""

    suite_id: str
    name: str
    version: str
    body_digest: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """What identifies a creating request, and what it answers."""

    key: str | None  # the Idempotency-Key; None = the caller gave none
    body_digest: str
    response_json: str
    now: datetime


class SuiteStore:
    """Suites and tasks in SQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def add_suite(self, suite: Suite, members: Sequence[Task], creation: Creation) -> str:
        """Store a suite with its tasks, all or nothing; the answer to give.

        `Conflict` where the name and version exist.
        """

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(
                insert(suites).values(
                    suite_id=suite.suite_id,
                    name=suite.name,
                    version=suite.version,
                    body_digest=suite.body_digest,
                    created_at=suite.created_at,
                )
            )
            for start in range(0, len(members), _INSERT_CHUNK):
                chunk = members[start : start + _INSERT_CHUNK]
                await connection.execute(insert(tasks), [_values(task, creation.now) for task in chunk])

        return await create_once(
            self._engine,
            route="suites",
            key=creation.key,
            body_digest=creation.body_digest,
            response_json=creation.response_json,
            write=write,
            taken=f"suite {suite.name} version {suite.version} exists with other tasks; use a new version",
            now=creation.now,
        )

    async def add_task(self, task: Task, creation: Creation) -> str:
        """Store one task at the end of its suite; the answer to give. `Conflict` where its name is taken."""

        async def write(connection: AsyncConnection) -> None:
            last = await connection.scalar(
                select(func.max(tasks.c.position)).where(tasks.c.suite_id == task.suite_id)
            )
            values = _values(task, creation.now) | {"position": 0 if last is None else last + 1}
            await connection.execute(insert(tasks).values(values))

        return await create_once(
            self._engine,
            route="tasks",
            key=creation.key,
            body_digest=creation.body_digest,
            response_json=creation.response_json,
            write=write,
            taken=f"the suite has a task named {task.name!r}",
            now=creation.now,
        )

    async def find(self, reference: str) -> Suite | None:
        """The suite with this id, `name@version`, or the newest version of this name; None = unknown."""
        name, _, version = reference.rpartition("@")
        named = and_(suites.c.name == name, suites.c.version == version) if name else suites.c.name == version
        query = (
            select(suites)
            .where(or_(suites.c.suite_id == reference, suites.c.name == reference, named))
            .order_by(suites.c.created_at.desc(), suites.c.suite_id.desc())
            .limit(1)
        )
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else _suite(row)

    async def require(self, reference: str, *, field: str) -> Suite:
        """As `find`; `InvalidInput` naming the field where there is no such suite."""
        suite = await self.find(reference)
        if suite is None:
            raise InvalidInput(field, f"there is no suite {reference!r}; GET /v1/suites lists them")
        return suite

    async def find_exact(self, name: str, version: str) -> Suite | None:
        """The suite of this name and version; None = unknown."""
        query = select(suites).where(suites.c.name == name, suites.c.version == version)
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else _suite(row)

    async def list_suites(self, *, after: tuple[datetime, str] | None, limit: int) -> list[Suite]:
        """A page in the order of creation, beginning after a key."""
        query = select(suites).order_by(suites.c.created_at, suites.c.suite_id).limit(limit)
        if after is not None:
            query = query.where(_after(suites.c.created_at, suites.c.suite_id, after))
        async with reading(self._engine) as connection:
            return [_suite(row) for row in (await connection.execute(query)).all()]

    async def counts(self, suite_ids: Sequence[str]) -> dict[str, dict[tuple[Split, TaskState], int]]:
        """Numbers of tasks by split and state, by suite."""
        query = (
            select(tasks.c.suite_id, tasks.c.split, tasks.c.state, func.count())
            .where(tasks.c.suite_id.in_(suite_ids))
            .group_by(tasks.c.suite_id, tasks.c.split, tasks.c.state)
        )
        found: dict[str, dict[tuple[Split, TaskState], int]] = {suite_id: {} for suite_id in suite_ids}
        async with reading(self._engine) as connection:
            for suite_id, split, state, number in (await connection.execute(query)).all():
                found[suite_id][Split(split), TaskState(state)] = number
        return found

    async def get_task(self, task_id: str) -> Task:
        """One task; `NotFound`."""
        async with reading(self._engine) as connection:
            row = (await connection.execute(select(tasks).where(tasks.c.task_id == task_id))).one_or_none()
        if row is None:
            raise NotFound(f"there is no task {task_id!r}")
        return _task(row)

    async def list_tasks(
        self,
        *,
        suite_id: str | None,
        split: Split | None,
        state: TaskState | None,
        after: tuple[datetime, str] | None,
        limit: int,
    ) -> list[tuple[Task, datetime]]:
        """A page in the order of creation, beginning after a key; None = any."""
        query = select(tasks).order_by(tasks.c.created_at, tasks.c.task_id).limit(limit)
        for column, value in ((tasks.c.suite_id, suite_id), (tasks.c.split, split), (tasks.c.state, state)):
            if value is not None:
                query = query.where(column == value)
        if after is not None:
            query = query.where(_after(tasks.c.created_at, tasks.c.task_id, after))
        async with reading(self._engine) as connection:
            rows = (await connection.execute(query)).all()
        return [(_task(row), row.created_at) for row in rows]

    async def find_by_names(
        self, names: Sequence[str], suite_id: str | None
    ) -> dict[str, list[tuple[str, TaskState]]]:
        """(id, state) of the tasks with one of these ids or names, by what was asked; None = any suite."""
        found: dict[str, list[tuple[str, TaskState]]] = {}
        wanted = list(dict.fromkeys(names))
        async with reading(self._engine) as connection:
            for start in range(0, len(wanted), _INSERT_CHUNK):
                chunk = wanted[start : start + _INSERT_CHUNK]
                query = select(tasks.c.task_id, tasks.c.name, tasks.c.state).where(
                    or_(tasks.c.task_id.in_(chunk), tasks.c.name.in_(chunk))
                )
                if suite_id is not None:
                    query = query.where(tasks.c.suite_id == suite_id)
                for task_id, name, state in (await connection.execute(query)).all():
                    found.setdefault(name, []).append((task_id, TaskState(state)))
                    found[task_id] = [(task_id, TaskState(state))]
        return found

    async def admitted_ids(self, suite_id: str, split: Split) -> list[str]:
        """Ids of the tasks that may be used, in the suite's order."""
        query = (
            select(tasks.c.task_id)
            .where(tasks.c.suite_id == suite_id, tasks.c.split == split, tasks.c.state == TaskState.ADMITTED)
            .order_by(tasks.c.position, tasks.c.task_id)
        )
        async with reading(self._engine) as connection:
            return list((await connection.execute(query)).scalars())

    async def admitting_ids(self) -> list[str]:
        """Ids of the tasks that wait for their verdict, oldest first."""
        query = (
            select(tasks.c.task_id)
            .where(tasks.c.state == TaskState.ADMITTING)
            .order_by(tasks.c.created_at, tasks.c.position, tasks.c.task_id)
        )
        async with reading(self._engine) as connection:
            return list((await connection.execute(query)).scalars())

    async def num_admitting(self, suite_id: str) -> int:
        """Tasks of a suite without a verdict."""
        query = select(func.count()).where(tasks.c.suite_id == suite_id, tasks.c.state == TaskState.ADMITTING)
        async with reading(self._engine) as connection:
            return (await connection.execute(query)).scalar_one()

    async def set_verdict(
        self, task_id: str, *, admitted: bool, reasons: Sequence[Mapping[str, object]]
    ) -> None:
        """Record a verdict; one that was given before stands."""
        state = TaskState.ADMITTED if admitted else TaskState.REJECTED
        statement = (
            update(tasks)
            .where(tasks.c.task_id == task_id, tasks.c.state == TaskState.ADMITTING)
            .values(state=state, reasons=list(reasons))
        )
        async with transaction(self._engine) as connection:
            await connection.execute(statement)


def _after(created_at: Any, row_id: Any, key: tuple[datetime, str]) -> Any:
    moment, last_id = key
    return or_(created_at > moment, and_(created_at == moment, row_id > last_id))


def _values(task: Task, now: datetime) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "suite_id": task.suite_id,
        "position": task.position,
        "name": task.name,
        "split": task.split,
        "instruction": task.instruction,
        "tools": list(task.tools),
        "tags": list(task.tags),
        "session_wall_s": task.session_wall_s,
        "spec": task.spec,
        "reference": task.reference,
        "state": task.state,
        "reasons": list(task.reasons),
        "created_at": now,
    }


def _suite(row: Row[Any]) -> Suite:
    return Suite(
        suite_id=row.suite_id,
        name=row.name,
        version=row.version,
        body_digest=row.body_digest,
        created_at=row.created_at,
    )


def _task(row: Row[Any]) -> Task:
    return Task(
        task_id=row.task_id,
        suite_id=row.suite_id,
        position=row.position,
        name=row.name,
        split=Split(row.split),
        instruction=row.instruction,
        tools=tuple(row.tools),
        tags=tuple(row.tags),
        session_wall_s=row.session_wall_s,
        spec=row.spec,
        reference=row.reference,
        state=TaskState(row.state),
        reasons=tuple(row.reasons),
    )
