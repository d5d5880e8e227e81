"""Engines and column types that behave the same on SQLite and PostgreSQL.

SQLite runs in WAL mode with a busy timeout, and a transaction begins IMMEDIATE: one that reads and then
writes would otherwise meet a lock that no waiting can resolve. One that only reads is begun with `reading`
and waits for no writer.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import DateTime, Text, TypeDecorator, event
from sqlalchemy.engine import URL, Dialect, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

SQLITE_BUSY_TIMEOUT_MS = 30_000
_POSTGRESQL_LIMITS = "-c idle_in_transaction_session_timeout=30s -c lock_timeout=20s"
_READS_ONLY = "practicum_reads_only"

naming_convention = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
"""Names for constraints, so that a migration can drop what another made."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive datetimes."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime without a zone cannot be stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """SQLite keeps no zone; what was stored was UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class JsonText(TypeDecorator[Any]):
    """A JSON value as text, the same bytes on every database.

    PostgreSQL's own types refuse U+0000 and lone surrogates, which a policy may well write; escaped
    as ASCII text both survive.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Encode."""
        return None if value is None else json.dumps(value, ensure_ascii=True, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Decode."""
        return None if value is None else json.loads(value)


def url_with_driver(url: str, *, sqlite: str) -> URL:
    """`sqlite:///path` or `postgresql://…` with its driver; makes the folder of a SQLite file.

    Raises `ValueError` for any other database.
    """
    parsed = make_url(url)
    match parsed.get_backend_name():
        case "sqlite":
            if parsed.database and parsed.database != ":memory:":
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            return parsed.set(drivername=sqlite)
        case "postgresql":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise ValueError(f"database_url: {other} is not supported; use sqlite:/// or postgresql://")


def create_engine(url: str) -> AsyncEngine:
    """An engine for `sqlite:///path` or `postgresql://…`; makes the folder of a SQLite file."""
    parsed = url_with_driver(url, sqlite="sqlite+aiosqlite")
    if parsed.get_backend_name() == "sqlite":
        engine = create_async_engine(parsed)
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin)
        return engine
    return create_async_engine(
        parsed,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=10,
        # A process that stands still inside a transaction must not hold up every other one.
        connect_args={"connect_timeout": 10, "options": _POSTGRESQL_LIMITS},
    )


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction: committed at the end, rolled back on any error."""
    async with engine.begin() as connection:
        yield connection


@asynccontextmanager
async def reading(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction that only reads, on one state of the database; a write in it is an error."""
    async with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            await connection.execution_options(**{_READS_ONLY: True})
        else:
            await connection.execution_options(postgresql_readonly=True)
        yield connection


async def check(engine: AsyncEngine) -> None:
    """Raise where the database does not answer."""
    async with reading(engine) as connection:
        await connection.exec_driver_sql("SELECT 1")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own transaction handling would begin DEFERRED; ours begins below.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin(connection: Any) -> None:
    reads_only = bool(connection.get_execution_options().get(_READS_ONLY))
    connection.exec_driver_sql(f"PRAGMA query_only={'ON' if reads_only else 'OFF'}")
    connection.exec_driver_sql("BEGIN DEFERRED" if reads_only else "BEGIN IMMEDIATE")
