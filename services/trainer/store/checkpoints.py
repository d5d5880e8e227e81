"""The checkpoints that SQL knows: what is committed, and what is on disk."""

from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.clock import Clock
from practicum.db.engine import reading, transaction
from practicum.errors import NotFound
from practicum.ids import new_id
from services.trainer.checkpoints.folders import WrittenCheckpoint
from services.trainer.store.queries import page
from services.trainer.store.records import CheckpointRecord, Cursor
from services.trainer.store.tables import checkpoints


class CheckpointStore:
    """Reads and retires checkpoints; a step's transaction inserts them."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def kept(self, run_id: str) -> list[CheckpointRecord]:
        """A run's checkpoints that are on disk, oldest first."""
        query = (
            select(checkpoints)
            .where(checkpoints.c.run_id == run_id, checkpoints.c.retired_at.is_(None))
            .order_by(checkpoints.c.weight_version)
        )
        async with reading(self._engine) as connection:
            return [_record(row) for row in await connection.execute(query)]

    async def retire(self, run_id: str, weight_versions: Collection[int]) -> None:
        """Mark checkpoints as retired; their folders are removed after this, never before."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(checkpoints)
                .where(
                    checkpoints.c.run_id == run_id, checkpoints.c.weight_version.in_(sorted(weight_versions))
                )
                .values(retired_at=self._clock.now())
            )

    async def by_id(self, checkpoint_id: str) -> CheckpointRecord:
        """A checkpoint by its id; `NotFound` where there is none."""
        return await self._one(
            select(checkpoints).where(checkpoints.c.checkpoint_id == checkpoint_id),
            f"checkpoint {checkpoint_id}",
        )

    async def of_run(self, run_id: str, weight_version: int | None) -> CheckpointRecord:
        """A run's checkpoint by version, the newest where None; `NotFound` where there is none."""
        query = select(checkpoints).where(checkpoints.c.run_id == run_id)
        if weight_version is None:
            query = query.order_by(checkpoints.c.weight_version.desc()).limit(1)
        else:
            query = query.where(checkpoints.c.weight_version == weight_version)
        wanted = "any version" if weight_version is None else f"version {weight_version}"
        return await self._one(query, f"{wanted} of run {run_id}")

    async def _one(self, query: Select[Any], what: str) -> CheckpointRecord:
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            raise NotFound(f"{what} is not known")
        return _record(row)

    async def page(self, *, limit: int, after: Cursor | None, run_id: str | None) -> list[CheckpointRecord]:
        """Checkpoints, newest first, after a cursor."""
        query = page(
            select(checkpoints),
            checkpoints.c.created_at,
            checkpoints.c.checkpoint_id,
            limit=limit,
            after=after,
            newest_first=True,
        )
        if run_id is not None:
            query = query.where(checkpoints.c.run_id == run_id)
        async with reading(self._engine) as connection:
            return [_record(row) for row in await connection.execute(query)]


async def insert_checkpoint(
    connection: AsyncConnection, run_id: str, written: WrittenCheckpoint, now: datetime
) -> CheckpointRecord:
    """Record a written folder, in the transaction that commits it."""
    record = CheckpointRecord(
        checkpoint_id=new_id("ckpt"),
        run_id=run_id,
        weight_version=written.weight_version,
        path=str(written.folder),
        manifest_sha256=written.manifest_sha256,
        size_bytes=written.size_bytes,
        created_at=now,
        retired_at=None,
    )
    await connection.execute(insert(checkpoints).values(**asdict(record)))
    return record


def _record(row: Row[Any]) -> CheckpointRecord:
    return CheckpointRecord(**row._mapping)
