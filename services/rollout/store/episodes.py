"""Episodes: their states, attempts, trajectories and grades.

A state changes by compare-and-set on (state, attempt): what ended stays as it ended, and a late result of
an earlier attempt changes nothing. An episode costs three small transactions: it is created with its group,
it ends with its trajectory, and it gets its grade together with others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, and_, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import reading, transaction
from practicum.errors import Conflict, NotFound
from practicum.trajectory import Outcome
from services.rollout.store.tables import episodes, groups, runs, trajectories


class EpisodeState(StrEnum):
    """Where an episode stands. The last four are final."""

    RUNNING = "running"  # to be played, or being played
    GRADING = "grading"
    GRADED = "graded"
    RECORDED = "recorded"  # a demonstration: sent to the trainer without a grade
    INFRA_FAILED = "infra_failed"
    CANCELLED = "cancelled"


OPEN_STATES = (EpisodeState.RUNNING, EpisodeState.GRADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """One episode as SQL holds it."""

    episode_id: str
    task_id: str
    run_id: str
    group_id: str
    group_index: int
    group_size: int
    evaluation_id: str | None  # None = not part of an evaluation
    demonstration_id: str | None  # None = not part of a demonstration
    position: int
    attempt: int
    state: EpisodeState
    outcome: Outcome | None  # None = not ended
    reward: float | None  # None = not graded, never 0
    grade: bytes | None  # a serialised `Grade`; None = not graded
    error: str
    num_turns: int
    num_sampled_tokens: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEpisode:
    """An episode to be created."""

    episode_id: str
    task_id: str
    run_id: str
    group_id: str
    group_index: int
    group_size: int
    position: int
    evaluation_id: str | None = None
    demonstration_id: str | None = None

    def stored(self, now: datetime) -> StoredEpisode:
        """The episode as SQL holds it right after its creation."""
        return StoredEpisode(
            episode_id=self.episode_id,
            task_id=self.task_id,
            run_id=self.run_id,
            group_id=self.group_id,
            group_index=self.group_index,
            group_size=self.group_size,
            evaluation_id=self.evaluation_id,
            demonstration_id=self.demonstration_id,
            position=self.position,
            attempt=1,
            state=EpisodeState.RUNNING,
            outcome=None,
            reward=None,
            grade=None,
            error="",
            num_turns=0,
            num_sampled_tokens=0,
            created_at=now,
            updated_at=now,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    episode_id: str
    attempt: int
    trajectory_id: str
    state: EpisodeState
    outcome: Outcome
    error: str
    trajectory: bytes
    diff: bytes
    num_turns: int
    num_sampled_tokens: int
    is_owed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeNote:
    """A grade as the reward service reported it."""

    episode_id: str
    attempt: int
    outcome: Outcome
    reward: float | None  # None = the platform could not grade
    grade: bytes
    error: str  # why there is no grade; empty where there is one


class EpisodeStore:
    """Groups, episodes and trajectories in SQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def bind_run(self, run_id: str, suite_id: str, now: datetime) -> str:
        """The suite a run samples: the one given at the first call, for ever."""
        query = select(runs.c.suite_id).where(runs.c.run_id == run_id)
        async with transaction(self._engine) as connection:
            bound = (await connection.execute(query)).scalar_one_or_none()
        if bound is not None:
            return str(bound)
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(
                    insert(runs).values(run_id=run_id, suite_id=suite_id, created_at=now)
                )
        except IntegrityError:
            async with transaction(self._engine) as connection:
                return str((await connection.execute(query)).scalar_one())
        return suite_id

    async def create_group(
        self, run_id: str, group_index: int, members: Sequence[NewEpisode], now: datetime
    ) -> None:
        """Store a group of one task with its episodes."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                insert(groups).values(
                    group_id=members[0].group_id,
                    run_id=run_id,
                    group_index=group_index,
                    task_id=members[0].task_id,
                    created_at=now,
                )
            )
            await insert_episodes(connection, members, now)

    async def num_groups(self, run_id: str) -> int:
        """The index of the run's next group."""
        query = select(func.max(groups.c.group_index)).where(groups.c.run_id == run_id)
        async with reading(self._engine) as connection:
            last = (await connection.execute(query)).scalar_one()
        return 0 if last is None else int(last) + 1

    async def unplayed(
        self,
        *,
        run_id: str | None = None,
        evaluation_id: str | None = None,
        demonstration_id: str | None = None,
    ) -> list[StoredEpisode]:
        """Episodes of one owner that still have to be played, in order."""
        query = select(episodes).where(episodes.c.state == EpisodeState.RUNNING)
        if run_id is not None:
            query = query.where(episodes.c.run_id == run_id, episodes.c.demonstration_id.is_(None))
        if evaluation_id is not None:
            query = query.where(episodes.c.evaluation_id == evaluation_id)
        if demonstration_id is not None:
            query = query.where(episodes.c.demonstration_id == demonstration_id)
        query = query.order_by(episodes.c.group_index, episodes.c.position)
        async with reading(self._engine) as connection:
            return [_episode(row) for row in (await connection.execute(query)).all()]

    async def runs_with_unplayed(self) -> list[str]:
        """Runs that have episodes to be played."""
        query = (
            select(episodes.c.run_id)
            .where(
                episodes.c.state == EpisodeState.RUNNING,
                episodes.c.run_id != "",
                episodes.c.demonstration_id.is_(None),
            )
            .distinct()
        )
        async with reading(self._engine) as connection:
            return list((await connection.execute(query)).scalars())

    async def next_attempt(self, episode_id: str, attempt: int, now: datetime) -> int | None:
        """Begin the attempt after `attempt`; its number, or None where the episode is not there any more."""
        statement = (
            update(episodes)
            .where(
                episodes.c.episode_id == episode_id,
                episodes.c.attempt == attempt,
                episodes.c.state == EpisodeState.RUNNING,
            )
            .values(attempt=attempt + 1, updated_at=now)
        )
        async with transaction(self._engine) as connection:
            result = await connection.execute(statement)
        return attempt + 1 if result.rowcount == 1 else None

    async def end(self, ending: Ending, now: datetime) -> bool:
        """Store how an attempt ended, with its trajectory; False where it was superseded or cancelled."""
        statement = (
            update(episodes)
            .where(
                episodes.c.episode_id == ending.episode_id,
                episodes.c.attempt == ending.attempt,
                episodes.c.state == EpisodeState.RUNNING,
            )
            .values(
                state=ending.state,
                outcome=ending.outcome,
                error=_plain(ending.error),
                is_owed=ending.is_owed,
                num_turns=ending.num_turns,
                num_sampled_tokens=ending.num_sampled_tokens,
                updated_at=now,
            )
        )
        async with transaction(self._engine) as connection:
            if (await connection.execute(statement)).rowcount != 1:
                return False
            await connection.execute(
                insert(trajectories).values(
                    trajectory_id=ending.trajectory_id,
                    episode_id=ending.episode_id,
                    attempt=ending.attempt,
                    trajectory=ending.trajectory,
                    diff=ending.diff,
                    created_at=now,
                )
            )
        return True

    async def record_grades(self, notes: Iterable[GradeNote], now: datetime) -> int:
        """Store grades, ignoring those of superseded attempts and of ended episodes; the number stored."""
        num_stored = 0
        async with transaction(self._engine) as connection:
            for note in notes:
                failed = note.reward is None
                statement = (
                    update(episodes)
                    .where(
                        episodes.c.episode_id == note.episode_id,
                        episodes.c.attempt == note.attempt,
                        episodes.c.state == EpisodeState.GRADING,
                    )
                    .values(
                        state=EpisodeState.INFRA_FAILED if failed else EpisodeState.GRADED,
                        outcome=note.outcome,
                        reward=note.reward,
                        grade=note.grade,
                        error=_plain(note.error),
                        updated_at=now,
                    )
                )
                num_stored += (await connection.execute(statement)).rowcount
        return num_stored

    async def cancel(self, episode_id: str, now: datetime) -> StoredEpisode:
        """End an open episode as cancelled. `NotFound`; `Conflict` where it has ended."""
        statement = (
            update(episodes)
            .where(episodes.c.episode_id == episode_id, episodes.c.state.in_(OPEN_STATES))
            .values(
                state=EpisodeState.CANCELLED,
                outcome=Outcome.CANCELLED,
                # The group of a run waits for this episode; an episode in grading reaches it by its grade.
                is_owed=and_(episodes.c.run_id != "", episodes.c.state == EpisodeState.RUNNING),
                updated_at=now,
            )
        )
        async with transaction(self._engine) as connection:
            changed = (await connection.execute(statement)).rowcount
        episode = await self.get(episode_id)
        if changed == 0:
            raise Conflict(f"the episode has ended: {episode.state}")
        return episode

    async def cancel_run(self, run_id: str, now: datetime) -> list[str]:
        """End every open episode of a run as cancelled; their ids. Nobody waits for their trajectories."""
        condition = and_(episodes.c.run_id == run_id, episodes.c.state.in_(OPEN_STATES))
        async with transaction(self._engine) as connection:
            ids = list((await connection.execute(select(episodes.c.episode_id).where(condition))).scalars())
            await connection.execute(
                update(episodes)
                .where(condition)
                .values(state=EpisodeState.CANCELLED, outcome=Outcome.CANCELLED, updated_at=now)
            )
        return ids

    async def mark_sent(self, episode_ids: Sequence[str]) -> None:
        """Nothing is owed to the trainer for these any more."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(episodes).where(episodes.c.episode_id.in_(episode_ids)).values(is_owed=False)
            )

    async def overdue(self, *, before: datetime, limit: int) -> list[StoredEpisode]:
        """Episodes that wait for a grade, or owe the trainer their end, since before a moment."""
        waiting = or_(episodes.c.state == EpisodeState.GRADING, episodes.c.is_owed.is_(True))
        query = (
            select(episodes)
            .where(waiting, episodes.c.updated_at < before)
            .order_by(episodes.c.updated_at)
            .limit(limit)
        )
        async with reading(self._engine) as connection:
            return [_episode(row) for row in (await connection.execute(query)).all()]

    async def touch(self, episode_ids: Sequence[str], now: datetime) -> None:
        """Count the overdue time of these from now."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(episodes).where(episodes.c.episode_id.in_(episode_ids)).values(updated_at=now)
            )

    async def ended_since(self, run_id: str, first_group_index: int) -> list[StoredEpisode]:
        """Ended episodes of a run's later groups: what the trainer must have been sent."""
        query = select(episodes).where(
            episodes.c.run_id == run_id,
            episodes.c.group_index >= first_group_index,
            episodes.c.state.not_in(OPEN_STATES),
        )
        async with reading(self._engine) as connection:
            return [_episode(row) for row in (await connection.execute(query)).all()]

    async def get(self, episode_id: str) -> StoredEpisode:
        """One episode; `NotFound`."""
        query = select(episodes).where(episodes.c.episode_id == episode_id)
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"there is no episode {episode_id!r}")
        return _episode(row)

    async def trajectory(self, episode_id: str, attempt: int) -> tuple[bytes, bytes] | None:
        """(trajectory, diff) of an attempt as messages; None = the attempt has not ended."""
        query = select(trajectories.c.trajectory, trajectories.c.diff).where(
            trajectories.c.episode_id == episode_id, trajectories.c.attempt == attempt
        )
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else (row.trajectory, row.diff)

    async def list_episodes(
        self,
        *,
        run_id: str | None,
        evaluation_id: str | None,
        state: EpisodeState | None,
        after: tuple[datetime, str] | None,
        limit: int,
    ) -> list[StoredEpisode]:
        """A page in the order of creation, beginning after a key; None = any."""
        query = select(episodes).order_by(episodes.c.created_at, episodes.c.episode_id).limit(limit)
        filters = (
            (episodes.c.run_id, run_id),
            (episodes.c.evaluation_id, evaluation_id),
            (episodes.c.state, state),
        )
        for column, value in filters:
            if value is not None:
                query = query.where(column == value)
        if after is not None:
            moment, last_id = after
            query = query.where(
                or_(
                    episodes.c.created_at > moment,
                    and_(episodes.c.created_at == moment, episodes.c.episode_id > last_id),
                )
            )
        async with reading(self._engine) as connection:
            return [_episode(row) for row in (await connection.execute(query)).all()]


async def insert_episodes(connection: AsyncConnection, members: Sequence[NewEpisode], now: datetime) -> None:
    """Store new episodes within a transaction."""
    values = [
        {
            "episode_id": member.episode_id,
            "task_id": member.task_id,
            "run_id": member.run_id,
            "group_id": member.group_id,
            "group_index": member.group_index,
            "group_size": member.group_size,
            "evaluation_id": member.evaluation_id,
            "demonstration_id": member.demonstration_id,
            "position": member.position,
            "attempt": 1,
            "state": EpisodeState.RUNNING,
            "error": "",
            "is_owed": False,
            "num_turns": 0,
            "num_sampled_tokens": 0,
            "created_at": now,
            "updated_at": now,
        }
        for member in members
    ]
    await connection.execute(insert(episodes), values)


async def has_open_episodes(connection: AsyncConnection, evaluation_id: str) -> bool:
    """Whether an evaluation still waits for an episode."""
    query = (
        select(episodes.c.episode_id)
        .where(episodes.c.evaluation_id == evaluation_id, episodes.c.state.in_(OPEN_STATES))
        .limit(1)
    )
    return (await connection.execute(query)).first() is not None


def _plain(text: str) -> str:
    """Text that every database stores: no U+0000, no lone surrogate."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _episode(row: Row[Any]) -> StoredEpisode:
    return StoredEpisode(
        episode_id=row.episode_id,
        task_id=row.task_id,
        run_id=row.run_id,
        group_id=row.group_id,
        group_index=row.group_index,
        group_size=row.group_size,
        evaluation_id=row.evaluation_id,
        demonstration_id=row.demonstration_id,
        position=row.position,
        attempt=row.attempt,
        state=EpisodeState(row.state),
        outcome=None if row.outcome is None else Outcome(row.outcome),
        reward=row.reward,
        grade=row.grade,
        error=row.error,
        num_turns=row.num_turns,
        num_sampled_tokens=row.num_sampled_tokens,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
