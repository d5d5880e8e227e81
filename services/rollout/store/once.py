"""Idempotent creation: the key's record and what it creates in one transaction."""

from collections.abc import Awaitable, Callable
from datetime import datetime

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import reading, transaction
from practicum.errors import Conflict
from practicum.rest.idempotency import IdempotencyRecord, replay
from services.rollout.store.tables import idempotency

Write = Callable[[AsyncConnection], Awaitable[None]]


async def create_once(
    engine: AsyncEngine,
    *,
    route: str,
    key: str | None,
    body_digest: str,
    response_json: str,
    write: Write,
    taken: str,
    now: datetime,
) -> str:
    """Run `write` unless the key already did; the answer to give.

    Raises `InvalidInput` where the key came with another body, and `Conflict` with the text `taken`
    where `write` meets a row that must be unique.
    """
    if key is not None:
        record = await _find(engine, route, key)
        if record is not None:
            return replay(record, body_digest)
    try:
        async with transaction(engine) as connection:
            if key is not None:
                await connection.execute(
                    insert(idempotency).values(
                        key=key,
                        route=route,
                        body_digest=body_digest,
                        response_json=response_json,
                        created_at=now,
                    )
                )
            await write(connection)
        return response_json
    except IntegrityError as error:
        # Either a request with the same key was faster, or what `write` makes exists.
        record = await _find(engine, route, key) if key is not None else None
        if record is not None:
            return replay(record, body_digest)
        raise Conflict(taken) from error


async def _find(engine: AsyncEngine, route: str, key: str) -> IdempotencyRecord | None:
    async with reading(engine) as connection:
        row = (
            await connection.execute(
                select(idempotency).where(idempotency.c.key == key, idempotency.c.route == route)
            )
        ).one_or_none()
    if row is None:
        return None
    return IdempotencyRecord(key=row.key, body_digest=row.body_digest, response_json=row.response_json)
