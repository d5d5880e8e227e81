"""Pieces of SQL that several of the stores use."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, Select, Table, and_, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from services.trainer.store.records import Cursor


def insert_or_skip(connection: AsyncConnection, table: Table, values: Mapping[str, Any]) -> Any:
    """INSERT … ON CONFLICT DO NOTHING, in the dialect of the connection."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).values(**values).on_conflict_do_nothing()
    return postgresql.insert(table).values(**values).on_conflict_do_nothing()


def page(
    query: Select[Any],
    created_at: Column[Any],
    row_id: Column[Any],
    *,
    limit: int,
    after: Cursor | None,
    newest_first: bool = False,
) -> Select[Any]:
    """The query ordered by (created_at, id), after a cursor: inserts never skip or repeat a row."""
    if newest_first:
        query = query.order_by(created_at.desc(), row_id.desc()).limit(limit)
    else:
        query = query.order_by(created_at, row_id).limit(limit)
    if after is None:
        return query
    if newest_first:
        later, same_time = created_at < after.created_at, row_id < after.row_id
    else:
        later, same_time = created_at > after.created_at, row_id > after.row_id
    return query.where(or_(later, and_(created_at == after.created_at, same_time)))
