"""What the SQL plumbing promises on SQLite."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, select, update
from sqlalchemy.exc import DBAPIError

from practicum.db.engine import JsonText, UtcDateTime, create_engine, reading, transaction

metadata = MetaData()
counters = Table("test_counters", metadata, Column("id", Integer, primary_key=True), Column("value", Integer))
values = Table(
    "test_values",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", UtcDateTime),
    Column("data", JsonText),
)


async def test_F12_transaction_when_eight_writers_share_a_row_loses_no_update(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/new/folder/db.sqlite")
    async with transaction(engine) as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(counters.insert().values(id=1, value=0))
        assert (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar() == "wal"
        assert (await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar() == 30_000

    async def count_up(times: int) -> None:
        for _ in range(times):
            async with transaction(engine) as connection:
                value = (await connection.execute(select(counters.c.value))).scalar_one()
                await connection.execute(update(counters).values(value=value + 1))

    await asyncio.gather(*(count_up(50) for _ in range(8)))
    async with transaction(engine) as connection:
        assert (await connection.execute(select(counters.c.value))).scalar_one() == 400
    await engine.dispose()


async def test_columns_when_round_tripped_keep_zones_and_any_text(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/db.sqlite")
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    text = "nul \x00 lone \ud800 é"
    async with transaction(engine) as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(values.insert().values(id=1, at=moment, data={"t": text}))
        row = (await connection.execute(select(values))).one()
    assert (row.at, row.data) == (moment, {"t": text})
    await engine.dispose()


async def test_transaction_when_the_body_raises_rolls_back(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/db.sqlite")
    async with transaction(engine) as connection:
        await connection.run_sync(metadata.create_all)
    with pytest.raises(RuntimeError):
        async with transaction(engine) as connection:
            await connection.execute(counters.insert().values(id=1, value=0))
            raise RuntimeError
    async with transaction(engine) as connection:
        assert (await connection.execute(select(counters))).all() == []
    await engine.dispose()


def test_create_engine_when_the_database_is_unknown_names_the_setting() -> None:
    with pytest.raises(ValueError, match="database_url: mysql"):
        create_engine("mysql://host/db")


async def test_reading_when_another_writes_waits_for_nobody_and_sees_one_state(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/db.sqlite")
    async with transaction(engine) as connection:
        await connection.run_sync(metadata.create_all)
        await connection.execute(counters.insert().values(id=1, value=1))
    async with asyncio.timeout(10), transaction(engine) as writing:
        await writing.execute(update(counters).values(value=2))
        async with reading(engine) as connection:  # a queue behind the writer would never end
            assert (await connection.execute(select(counters.c.value))).scalar_one() == 1
            await writing.commit()
            assert (await connection.execute(select(counters.c.value))).scalar_one() == 1
    async with reading(engine) as connection:
        assert (await connection.execute(select(counters.c.value))).scalar_one() == 2
    await engine.dispose()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
async def test_reading_when_it_writes_is_refused_and_the_connection_writes_again_after(
    request: pytest.FixtureRequest, tmp_path: Path, backend: str
) -> None:
    url = (
        f"sqlite:///{tmp_path}/db.sqlite" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    )
    engine = create_engine(url)
    async with transaction(engine) as connection:
        await connection.run_sync(metadata.create_all)
    for number in range(3):
        async with transaction(engine) as connection:
            await connection.execute(counters.insert().values(id=number, value=1))
        with pytest.raises(DBAPIError, match=r"read-?only"):
            async with reading(engine) as connection:
                await connection.execute(update(counters).values(value=2))
    async with reading(engine) as connection:
        assert (await connection.execute(select(counters.c.value))).scalars().all() == [1, 1, 1]
    await engine.dispose()
