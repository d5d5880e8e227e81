"""Who plays an open episode: its owner, a replica of this service.

A replica plays only what it owns. What nobody owns is claimed, which begins the next attempt, so that whoever
had it before cannot end it any more. The name of a replica that is gone (see `replicas`) owns nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.db.engine import reading, transaction
from services.rollout.store.episodes import EpisodeState, StoredEpisode, episode_of
from services.rollout.store.tables import episodes, replicas, tasks
from services.rollout.tasks import TaskState


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """Whose episodes are meant: exactly one of these is given."""

    run_id: str | None = None
    evaluation_id: str | None = None
    demonstration_id: str | None = None

    def condition(self) -> ColumnElement[bool]:
        """True for the episodes that may be claimed."""
        gone = episodes.c.owner.not_in(select(replicas.c.instance))
        unowned = or_(episodes.c.owner.is_(None), gone)
        free = and_(episodes.c.state == EpisodeState.RUNNING, unowned)
        if self.run_id is not None:
            return and_(free, episodes.c.run_id == self.run_id, episodes.c.demonstration_id.is_(None))
        if self.evaluation_id is not None:
            return and_(free, episodes.c.evaluation_id == self.evaluation_id)
        judged = select(tasks.c.task_id).where(tasks.c.state != TaskState.ADMITTING)
        own = episodes.c.demonstration_id == self.demonstration_id
        return and_(free, own, episodes.c.task_id.in_(judged))


class ClaimStore:
    """Owners of episodes in SQL, as one replica sees and writes them."""

    def __init__(self, engine: AsyncEngine, instance: str) -> None:
        self._engine = engine
        self._instance = instance

    async def num_unowned(self, whose: Whose) -> int:
        """Episodes that may be claimed."""
        query = select(func.count()).select_from(episodes).where(whose.condition())
        async with reading(self._engine) as connection:
            return int((await connection.execute(query)).scalar_one())

    async def claim(self, whose: Whose, limit: int, now: datetime) -> list[StoredEpisode]:
        """Take up to `limit` episodes that nobody owns, in order, each as its next attempt."""
        query = (
            select(episodes)
            .where(whose.condition())
            .order_by(episodes.c.group_index, episodes.c.position)
            .limit(limit)
            # Another replica's claim under way is passed over, not waited for.
            .with_for_update(skip_locked=True)
        )
        async with transaction(self._engine) as connection:
            found = [episode_of(row) for row in (await connection.execute(query)).all()]
            if found:
                await connection.execute(
                    update(episodes)
                    .where(episodes.c.episode_id.in_([episode.episode_id for episode in found]))
                    .values(owner=self._instance, attempt=episodes.c.attempt + 1, updated_at=now)
                )
        return [
            replace(episode, owner=self._instance, attempt=episode.attempt + 1, updated_at=now)
            for episode in found
        ]

    async def give_back(self, episode_ids: Sequence[str]) -> None:
        """Let any replica claim those of these that this one owns and that have not ended."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(episodes).where(episodes.c.episode_id.in_(episode_ids), self._own()).values(owner=None)
            )

    async def own_running(self, *, before: datetime) -> list[str]:
        """Open episodes of this replica that did not change since a moment."""
        query = select(episodes.c.episode_id).where(self._own(), episodes.c.updated_at < before)
        async with reading(self._engine) as connection:
            return list((await connection.execute(query)).scalars())

    async def lost(self, episode_ids: Sequence[str]) -> list[str]:
        """Those of these that are cancelled, or not this replica's any more: to play on is for nothing."""
        not_own = or_(episodes.c.owner.is_(None), episodes.c.owner != self._instance)
        query = select(episodes.c.episode_id).where(
            episodes.c.episode_id.in_(episode_ids),
            or_(
                episodes.c.state == EpisodeState.CANCELLED,
                and_(episodes.c.state == EpisodeState.RUNNING, not_own),
            ),
        )
        async with reading(self._engine) as connection:
            return list((await connection.execute(query)).scalars())

    def _own(self) -> ColumnElement[bool]:
        return and_(episodes.c.owner == self._instance, episodes.c.state == EpisodeState.RUNNING)
