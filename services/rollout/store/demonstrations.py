"""Demonstrations: scripted episodes, with their scripts, so that a restart takes them up again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import zstandard
from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import reading, transaction
from practicum.errors import NotFound
from services.rollout.store.episodes import OPEN_STATES, EpisodeState, NewEpisode, insert_episodes
from services.rollout.store.once import create_once
from services.rollout.store.suites import Creation
from services.rollout.store.tables import demonstrations, episodes

MAX_SCRIPT_BYTES = 1 << 30
_INSERT_CHUNK = 200


class DemonstrationState(StrEnum):
    """Where a set of demonstrations stands."""

    RUNNING = "running"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """One turn of a script: prose, then calls as (name, arguments)."""

    text: str
    tool_calls: tuple[tuple[str, Mapping[str, object]], ...]


Script = tuple[ScriptedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """One set of demonstrations for a run."""

    demonstration_id: str
    run_id: str
    state: DemonstrationState
    created_at: datetime
    finished_at: datetime | None  # None = not completed


class DemonstrationStore:
    """Demonstrations in SQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def create(
        self,
        demonstration: DemonstrationSet,
        scripts: Sequence[Script],
        members: Sequence[NewEpisode],
        creation: Creation,
    ) -> str:
        """Store a set; script i belongs to the episode at position i. The answer to give."""

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(
                insert(demonstrations).values(
                    demonstration_id=demonstration.demonstration_id,
                    run_id=demonstration.run_id,
                    state=demonstration.state,
                    scripts=_pack(scripts),
                    created_at=demonstration.created_at,
                )
            )
            for start in range(0, len(members), _INSERT_CHUNK):
                await insert_episodes(
                    connection, members[start : start + _INSERT_CHUNK], demonstration.created_at
                )

        return await create_once(
            self._engine,
            route="demonstrations",
            key=creation.key,
            body_digest=creation.body_digest,
            response_json=creation.response_json,
            write=write,
            taken="the demonstration exists",
            now=creation.now,
        )

    async def get(self, demonstration_id: str) -> DemonstrationSet:
        """One set; `NotFound`."""
        query = select(*_COLUMNS).where(demonstrations.c.demonstration_id == demonstration_id)
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"there is no demonstration set {demonstration_id!r}")
        return _set(row)

    async def running(self) -> list[DemonstrationSet]:
        """Sets that are not completed, oldest first."""
        query = (
            select(*_COLUMNS)
            .where(demonstrations.c.state == DemonstrationState.RUNNING)
            .order_by(demonstrations.c.created_at)
        )
        async with reading(self._engine) as connection:
            return [_set(row) for row in (await connection.execute(query)).all()]

    async def scripts(self, demonstration_id: str) -> list[Script]:
        """The scripts by position."""
        query = select(demonstrations.c.scripts).where(demonstrations.c.demonstration_id == demonstration_id)
        async with reading(self._engine) as connection:
            return _unpack((await connection.execute(query)).scalar_one())

    async def complete_if_done(self, demonstration_id: str, now: datetime) -> bool:
        """Complete it where every episode has ended; whether it is completed now for the first time."""
        open_ones = (
            select(episodes.c.episode_id)
            .where(episodes.c.demonstration_id == demonstration_id, episodes.c.state.in_(OPEN_STATES))
            .limit(1)
        )
        async with transaction(self._engine) as connection:
            if (await connection.execute(open_ones)).first() is not None:
                return False
            statement = (
                update(demonstrations)
                .where(
                    demonstrations.c.demonstration_id == demonstration_id,
                    demonstrations.c.state == DemonstrationState.RUNNING,
                )
                .values(state=DemonstrationState.COMPLETED, finished_at=now)
            )
            return (await connection.execute(statement)).rowcount == 1

    async def counts(self, demonstration_id: str) -> dict[EpisodeState, int]:
        """Numbers of episodes by state."""
        query = (
            select(episodes.c.state, func.count())
            .where(episodes.c.demonstration_id == demonstration_id)
            .group_by(episodes.c.state)
        )
        async with reading(self._engine) as connection:
            rows = (await connection.execute(query)).all()
        return {EpisodeState(state): number for state, number in rows}


_COLUMNS = [column for column in demonstrations.c if column.name != "scripts"]


def _set(row: Row[Any]) -> DemonstrationSet:
    return DemonstrationSet(
        demonstration_id=row.demonstration_id,
        run_id=row.run_id,
        state=DemonstrationState(row.state),
        created_at=row.created_at,
        finished_at=row.finished_at,
    )


def _pack(scripts: Sequence[Script]) -> bytes:
    plain = [[[turn.text, [list(call) for call in turn.tool_calls]] for turn in script] for script in scripts]
    return zstandard.ZstdCompressor(level=3).compress(json.dumps(plain).encode())


def _unpack(packed: bytes) -> list[Script]:
    plain = json.loads(zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_SCRIPT_BYTES))
    return [
        tuple(
            ScriptedTurn(text=text, tool_calls=tuple((name, arguments) for name, arguments in calls))
            for text, calls in script
        )
        for script in plain
    ]
