"""Trajectories that were set aside, with the reason and, where it is small enough, their bytes."""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.db.engine import reading, transaction
from services.trainer.store.queries import insert_or_skip, page
from services.trainer.store.records import Cursor, QuarantineRecord
from services.trainer.store.tables import quarantine


class QuarantineStore:
    """What intake refused to train."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def add(self, record: QuarantineRecord, payload: bytes | None) -> bool:
        """Set a trajectory aside; False where this very event was set aside before."""
        values = {**asdict(record), "payload": payload}
        async with transaction(self._engine) as connection:
            statement = insert_or_skip(connection, quarantine, values).returning(quarantine.c.quarantine_id)
            return (await connection.execute(statement)).first() is not None

    async def count(self, run_ids: Sequence[str]) -> dict[str, int]:
        """How many were set aside, by run."""
        query = (
            select(quarantine.c.run_id, func.count())
            .where(quarantine.c.run_id.in_(run_ids))
            .group_by(quarantine.c.run_id)
        )
        async with reading(self._engine) as connection:
            found = {run_id: int(count) for run_id, count in await connection.execute(query)}
        return {run_id: found.get(run_id, 0) for run_id in run_ids}

    async def page(self, run_id: str, *, limit: int, after: Cursor | None) -> list[QuarantineRecord]:
        """What a run set aside, oldest first, after a cursor."""
        columns = [column for column in quarantine.c if column is not quarantine.c.payload]
        query = page(
            select(*columns), quarantine.c.created_at, quarantine.c.quarantine_id, limit=limit, after=after
        ).where(quarantine.c.run_id == run_id)
        async with reading(self._engine) as connection:
            return [QuarantineRecord(**row._mapping) for row in await connection.execute(query)]

    async def payload(self, trajectory_id: str) -> bytes | None:
        """The serialised trajectory that was set aside last under this id; None where it is not kept."""
        query = (
            select(quarantine.c.payload)
            .where(quarantine.c.trajectory_id == trajectory_id)
            .order_by(quarantine.c.created_at.desc())
            .limit(1)
        )
        async with reading(self._engine) as connection:
            payload = (await connection.execute(query)).scalar()
        return None if payload is None else bytes(payload)
