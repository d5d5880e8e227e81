"""Stored grades: one a trajectory, the first one counts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.db.engine import reading, transaction
from practicum.errors import NotFound
from practicum.trajectory import Grade, GradeComponent, Outcome, TestResult
from services.reward.store.tables import grades


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGrade:
    """A grade with what it belongs to."""

    trajectory_id: str
    run_id: str
    task_id: str
    outcome: Outcome
    grade: Grade
    created_at: datetime


class GradeStore:
    """Grades in SQL. Never graded twice: a second `put` of a trajectory returns the first."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def find(self, trajectory_id: str) -> StoredGrade | None:
        """The grade of a trajectory; None where it has none yet."""
        statement = select(grades).where(grades.c.trajectory_id == trajectory_id)
        async with reading(self._engine) as connection:
            row = (await connection.execute(statement)).one_or_none()
        return None if row is None else _from_row(row)

    async def get(self, trajectory_id: str) -> StoredGrade:
        """The grade of a trajectory. Raises `NotFound`."""
        stored = await self.find(trajectory_id)
        if stored is None:
            raise NotFound(f"no grade of trajectory {trajectory_id}")
        return stored

    async def put(self, stored: StoredGrade) -> StoredGrade:
        """Stores a grade, or returns the one that another consumer stored first."""
        values = {
            "trajectory_id": stored.trajectory_id,
            "run_id": stored.run_id,
            "task_id": stored.task_id,
            "outcome": stored.outcome.value,
            "reward": stored.grade.reward,
            "grade": asdict(stored.grade),
            "created_at": stored.created_at,
        }
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(grades.insert().values(**values))
        except IntegrityError:
            return await self.get(stored.trajectory_id)
        return stored

    async def page(
        self, *, run_id: str | None, after: tuple[datetime, str] | None, limit: int
    ) -> Sequence[StoredGrade]:
        """Grades in the order in which they were given, after a key."""
        statement = select(grades).order_by(grades.c.created_at, grades.c.trajectory_id).limit(limit)
        if run_id is not None:
            statement = statement.where(grades.c.run_id == run_id)
        if after is not None:
            created_at, trajectory_id = after
            statement = statement.where(
                or_(
                    grades.c.created_at > created_at,
                    and_(grades.c.created_at == created_at, grades.c.trajectory_id > trajectory_id),
                )
            )
        async with reading(self._engine) as connection:
            rows = (await connection.execute(statement)).all()
        return [_from_row(row) for row in rows]


def _from_row(row: Row[Any]) -> StoredGrade:
    grade: dict[str, Any] = row.grade
    return StoredGrade(
        trajectory_id=row.trajectory_id,
        run_id=row.run_id,
        task_id=row.task_id,
        outcome=Outcome(row.outcome),
        grade=Grade(
            reward=grade["reward"],
            components=tuple(GradeComponent(**part) for part in grade["components"]),
            tests=tuple(TestResult(**test) for test in grade["tests"]),
            evidence=tuple(grade["evidence"]),
            grader=grade["grader"],
            grader_version=grade["grader_version"],
            sandbox_backend=grade["sandbox_backend"],
            seconds=grade["seconds"],
        ),
        created_at=row.created_at,
    )
