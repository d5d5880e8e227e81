"""Evaluations: a fixed set of episodes whose grades are summed up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, case, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import reading, transaction
from practicum.errors import NotFound
from services.rollout.store.episodes import (
    OPEN_STATES,
    EpisodeState,
    NewEpisode,
    has_open_episodes,
    insert_episodes,
)
from services.rollout.store.once import create_once
from services.rollout.store.suites import Creation
from services.rollout.store.tables import episodes, evaluations

PASSING_REWARD = 1.0
_INSERT_CHUNK = 200


class EvaluationState(StrEnum):
    """Where an evaluation stands."""

    RUNNING = "running"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation as SQL holds it."""

    evaluation_id: str
    suite_id: str
    request: Mapping[str, Any]  # as the caller gave it, with defaults filled in
    state: EvaluationState
    weight_version: int | None  # served when it began; None = not begun
    engine_utilisation: float | None  # while it generated; None = not known
    created_at: datetime
    finished_at: datetime | None  # None = not completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over an evaluation's episodes."""

    num_episodes: int
    num_done: int
    num_graded: int
    num_passed: int
    num_infra_failed: int
    mean_turns: float | None  # None = no episode has ended
    tokens_generated: int


class EvaluationStore:
    """Evaluations in SQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def create(self, evaluation: Evaluation, members: Sequence[NewEpisode], creation: Creation) -> str:
        """Store an evaluation with its episodes; the answer to give."""

        async def write(connection: AsyncConnection) -> None:
            await connection.execute(
                insert(evaluations).values(
                    evaluation_id=evaluation.evaluation_id,
                    suite_id=evaluation.suite_id,
                    request=dict(evaluation.request),
                    state=evaluation.state,
                    created_at=evaluation.created_at,
                )
            )
            for start in range(0, len(members), _INSERT_CHUNK):
                chunk = members[start : start + _INSERT_CHUNK]
                await insert_episodes(connection, chunk, evaluation.created_at)

        return await create_once(
            self._engine,
            route="evaluations",
            key=creation.key,
            body_digest=creation.body_digest,
            response_json=creation.response_json,
            write=write,
            taken="the evaluation exists",
            now=creation.now,
        )

    async def get(self, evaluation_id: str) -> Evaluation:
        """One evaluation; `NotFound`."""
        query = select(evaluations).where(evaluations.c.evaluation_id == evaluation_id)
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFound(f"there is no evaluation {evaluation_id!r}")
        return _evaluation(row)

    async def running(self) -> list[Evaluation]:
        """Evaluations that are not completed, oldest first."""
        query = (
            select(evaluations)
            .where(evaluations.c.state == EvaluationState.RUNNING)
            .order_by(evaluations.c.created_at)
        )
        async with reading(self._engine) as connection:
            return [_evaluation(row) for row in (await connection.execute(query)).all()]

    async def set_weight_version(self, evaluation_id: str, weight_version: int) -> None:
        """Record what was served when it began; the first record stands."""
        statement = (
            update(evaluations)
            .where(evaluations.c.evaluation_id == evaluation_id, evaluations.c.weight_version.is_(None))
            .values(weight_version=weight_version)
        )
        async with transaction(self._engine) as connection:
            await connection.execute(statement)

    async def set_utilisation(self, evaluation_id: str, share: float) -> None:
        """Record how busy the engines were while it generated."""
        statement = (
            update(evaluations)
            .where(evaluations.c.evaluation_id == evaluation_id)
            .values(engine_utilisation=share)
        )
        async with transaction(self._engine) as connection:
            await connection.execute(statement)

    async def complete_if_done(self, evaluation_id: str, now: datetime) -> bool:
        """Complete it where every episode has ended; whether it is completed now for the first time."""
        async with transaction(self._engine) as connection:
            if await has_open_episodes(connection, evaluation_id):
                return False
            statement = (
                update(evaluations)
                .where(
                    evaluations.c.evaluation_id == evaluation_id,
                    evaluations.c.state == EvaluationState.RUNNING,
                )
                .values(state=EvaluationState.COMPLETED, finished_at=now)
            )
            return (await connection.execute(statement)).rowcount == 1

    async def tally(self, evaluation_id: str) -> Tally:
        """Sums over its episodes."""
        ended = episodes.c.state.not_in(OPEN_STATES)
        graded = episodes.c.state == EpisodeState.GRADED
        passed = graded & (episodes.c.reward >= PASSING_REWARD)
        played = ended & (episodes.c.state != EpisodeState.INFRA_FAILED)
        query = select(
            func.count(),
            _count(ended),
            _count(graded),
            _count(passed),
            _count(episodes.c.state == EpisodeState.INFRA_FAILED),
            func.avg(case((played, episodes.c.num_turns))),
            func.coalesce(func.sum(episodes.c.num_sampled_tokens), 0),
        ).where(episodes.c.evaluation_id == evaluation_id)
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one()
        return Tally(
            num_episodes=row[0],
            num_done=row[1],
            num_graded=row[2],
            num_passed=row[3],
            num_infra_failed=row[4],
            mean_turns=None if row[5] is None else float(row[5]),
            tokens_generated=int(row[6]),
        )


def _count(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def _evaluation(row: Row[Any]) -> Evaluation:
    return Evaluation(
        evaluation_id=row.evaluation_id,
        suite_id=row.suite_id,
        request=row.request,
        state=EvaluationState(row.state),
        weight_version=row.weight_version,
        engine_utilisation=row.engine_utilisation,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )
