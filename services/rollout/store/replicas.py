"""The replicas of this service, and what of theirs is given up when one is gone.

What a replica owns (episodes it plays, tasks it has checked, the lease on the weights) lies in columns that
hold its name. It is freed in the transaction that removes the replica, so that nothing is ever owned by a
name that nobody answers to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import transaction
from services.rollout.store.episodes import EpisodeState
from services.rollout.store.tables import episodes, replicas, tasks, weights_lease
from services.rollout.tasks import TaskState


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A replica as it was last heard of."""

    instance: str
    life: str
    num_beats: int


class ReplicaStore:
    """Replicas in SQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def join(self, beat: Beat, now: datetime) -> bool:
        """Begin a life, freeing what an earlier one of the name owned; whether no other replica is there."""
        async with transaction(self._engine) as connection:
            await connection.execute(delete(replicas).where(replicas.c.instance == beat.instance))
            await _free(connection, beat.instance)
            others = (await connection.execute(select(func.count()).select_from(replicas))).scalar_one()
            await connection.execute(
                insert(replicas).values(
                    instance=beat.instance, life=beat.life, num_beats=beat.num_beats, joined_at=now
                )
            )
        return int(others) == 0

    async def beat(self, beat: Beat) -> Sequence[Beat]:
        """Say that this life goes on, where it is not given up; every replica, this one among them."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(replicas)
                .where(replicas.c.instance == beat.instance, replicas.c.life == beat.life)
                .values(num_beats=beat.num_beats)
            )
            rows = (await connection.execute(select(replicas).order_by(replicas.c.instance))).all()
        return [Beat(instance=row.instance, life=row.life, num_beats=row.num_beats) for row in rows]

    async def remove(self, beat: Beat, *, as_heard: bool) -> bool:
        """End a replica's life and free what it owns; whether it was there.

        `as_heard`: only where it was not heard of again since.
        """
        statement = delete(replicas).where(replicas.c.instance == beat.instance, replicas.c.life == beat.life)
        if as_heard:
            statement = statement.where(replicas.c.num_beats == beat.num_beats)
        async with transaction(self._engine) as connection:
            if (await connection.execute(statement)).rowcount != 1:
                return False
            await _free(connection, beat.instance)
        return True


async def _free(connection: AsyncConnection, instance: str) -> None:
    await connection.execute(
        update(episodes)
        .where(episodes.c.owner == instance, episodes.c.state == EpisodeState.RUNNING)
        .values(owner=None)
    )
    await connection.execute(
        update(tasks)
        .where(tasks.c.owner == instance, tasks.c.state == TaskState.ADMITTING)
        .values(owner=None)
    )
    await connection.execute(
        update(weights_lease)
        .where(weights_lease.c.holder == instance)
        .values(holder="", fence=weights_lease.c.fence + 1)
    )
