"""Runs and their steps. One public method is one transaction.

States are changed by compare-and-set only: a terminal state never changes, and a step commits only
on the version it was computed from. Raises SQLAlchemy's errors where the database is away; the
worker's back-off is the one place that retries.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.clock import Clock
from practicum.db.engine import reading, transaction
from practicum.errors import Conflict, NotFound
from practicum.ids import new_id
from practicum.rest.idempotency import IdempotencyRecord, replay
from services.trainer.checkpoints.folders import WrittenCheckpoint
from services.trainer.spec import TERMINAL_STATES, RunSpec, RunState, spec_from_json, spec_to_json
from services.trainer.store import tables
from services.trainer.store.checkpoints import insert_checkpoint
from services.trainer.store.queries import insert_or_skip, page
from services.trainer.store.records import (
    CheckpointRecord,
    Consumed,
    ConsumedEpisode,
    Cursor,
    RunRecord,
    StepRecord,
)

ACTIVE_STATES = frozenset(RunState) - TERMINAL_STATES


class RunStore:
    """Runs, their steps and what those consumed."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def create(self, spec: RunSpec, *, key: str | None = None, digest: str = "") -> RunRecord:
        """Store a run, pending or held as it asks.

        Where the idempotency `key` made one before, nothing is stored and that run is returned.
        Raises `InvalidInput` where the key was used with another body.
        """
        run_id, now = new_id("run"), self._clock.now()
        async with transaction(self._engine) as connection:
            if key is not None:
                # The key first: of two requests at once the second waits here for the first.
                made = await self._claim_key(connection, key, digest, run_id)
                if made != run_id:
                    return await _run(connection, made)
            await connection.execute(
                insert(tables.runs).values(
                    run_id=run_id,
                    name=spec.name,
                    state=RunState.PAUSED if spec.start_paused else RunState.PENDING,
                    error="",
                    spec_json=spec_to_json(spec),
                    weight_version=-1,
                    published_version=None,
                    publish_error="",
                    groups_consumed=0,
                    batches_discarded=0,
                    duplicates_refused=0,
                    superseded_refused=0,
                    created_at=now,
                    updated_at=now,
                )
            )
            return await _run(connection, run_id)

    async def _claim_key(self, connection: AsyncConnection, key: str, digest: str, run_id: str) -> str:
        """The id of the run that the key stands for: `run_id` where the key is new."""
        table = tables.idempotency
        values = {"key": key, "body_digest": digest, "run_id": run_id, "created_at": self._clock.now()}
        await connection.execute(insert_or_skip(connection, table, values))
        row = (await connection.execute(select(table).where(table.c.key == key))).one()
        return replay(
            IdempotencyRecord(key=key, body_digest=row.body_digest, response_json=row.run_id), digest
        )

    async def get(self, run_id: str) -> RunRecord:
        """A run; `NotFound` where there is none."""
        async with reading(self._engine) as connection:
            return await _run(connection, run_id)

    async def in_states(self, states: Collection[RunState]) -> list[RunRecord]:
        """Runs in these states, or all where empty, oldest first."""
        query = select(tables.runs).order_by(tables.runs.c.created_at, tables.runs.c.run_id)
        if states:
            query = query.where(tables.runs.c.state.in_(sorted(states)))
        async with reading(self._engine) as connection:
            return [_run_record(row) for row in await connection.execute(query)]

    async def page(self, *, limit: int, after: Cursor | None, state: RunState | None) -> list[RunRecord]:
        """Runs, oldest first, after a cursor."""
        table = tables.runs
        query = page(select(table), table.c.created_at, table.c.run_id, limit=limit, after=after)
        if state is not None:
            query = query.where(table.c.state == state)
        async with reading(self._engine) as connection:
            return [_run_record(row) for row in await connection.execute(query)]

    async def claim_next(self) -> RunRecord | None:
        """The run to train now, marked as running: the one that was running, else the oldest pending."""
        table = tables.runs
        async with transaction(self._engine) as connection:
            for state in (RunState.RUNNING, RunState.PENDING):
                query = (
                    select(table)
                    .where(table.c.state == state)
                    .order_by(table.c.created_at, table.c.run_id)
                    .limit(1)
                )
                row = (await connection.execute(query)).first()
                if row is not None:
                    await _set_state(connection, self._clock, row.run_id, {state}, RunState.RUNNING, "")
                    return await _run(connection, row.run_id)
        return None

    async def not_ready(self) -> list[RunRecord]:
        """Held runs whose base was not committed or never served, oldest first."""
        table = tables.runs
        query = (
            select(table)
            .where(table.c.state == RunState.PAUSED, table.c.weight_version <= 0)
            .where(table.c.published_version.is_(None))
            .order_by(table.c.created_at, table.c.run_id)
        )
        async with reading(self._engine) as connection:
            return [_run_record(row) for row in await connection.execute(query)]

    async def change_state(
        self,
        run_id: str,
        to: RunState,
        *,
        allowed: Collection[RunState],
        already: Collection[RunState] = (),
        error: str = "",
    ) -> RunRecord:
        """Compare-and-set from `allowed`; a run in `already` is returned as it is.

        Raises `NotFound`, or `Conflict` naming the state that forbids it.
        """
        async with transaction(self._engine) as connection:
            changed = await _set_state(connection, self._clock, run_id, allowed, to, error)
            run = await _run(connection, run_id)
            if not changed and run.state not in already:
                raise Conflict(f"run {run_id} is {run.state} and cannot become {to}")
            return run

    async def count_refused(self, run_id: str, *, duplicates: int = 0, superseded: int = 0) -> None:
        """Add to what a run refused."""
        table = tables.runs
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(table)
                .where(table.c.run_id == run_id)
                .values(
                    duplicates_refused=table.c.duplicates_refused + duplicates,
                    superseded_refused=table.c.superseded_refused + superseded,
                )
            )

    async def commit_base(self, run_id: str, written: WrittenCheckpoint) -> CheckpointRecord:
        """Record version 0: the base weights."""
        async with transaction(self._engine) as connection:
            await self._move_version(connection, run_id, to=0, num_groups=0)
            return await insert_checkpoint(connection, run_id, written, self._clock.now())

    async def commit_step(
        self,
        run_id: str,
        *,
        written: WrittenCheckpoint,
        episodes: Iterable[ConsumedEpisode],
        num_groups: int,
        metrics: Mapping[str, Any],
    ) -> CheckpointRecord:
        """Record a step with everything it consumed, or nothing at all.

        Raises `Conflict` where the run is over or at another version, `IntegrityError` where an
        episode was consumed before.
        """
        step = written.weight_version
        async with transaction(self._engine) as connection:
            await self._move_version(connection, run_id, to=step, num_groups=num_groups)
            await connection.execute(
                insert(tables.steps).values(
                    run_id=run_id,
                    step=step,
                    metrics_json=dict(metrics),
                    publish_json=None,
                    committed_at=self._clock.now(),
                )
            )
            await _insert_consumed(connection, run_id, step, episodes)
            return await insert_checkpoint(connection, run_id, written, self._clock.now())

    async def discard_batch(
        self, run_id: str, *, episodes: Iterable[ConsumedEpisode], num_groups: int
    ) -> None:
        """Record that a batch without a usable trajectory was taken out; the version stays."""
        table = tables.runs
        async with transaction(self._engine) as connection:
            changed = await connection.execute(
                update(table)
                .where(table.c.run_id == run_id, table.c.state.in_(sorted(ACTIVE_STATES)))
                .values(
                    groups_consumed=table.c.groups_consumed + num_groups,
                    batches_discarded=table.c.batches_discarded + 1,
                    updated_at=self._clock.now(),
                )
            )
            if not changed.rowcount:
                raise Conflict(f"run {run_id} is over")
            await _insert_consumed(connection, run_id, None, episodes)

    async def _move_version(
        self, connection: AsyncConnection, run_id: str, *, to: int, num_groups: int
    ) -> None:
        table = tables.runs
        changed = await connection.execute(
            update(table)
            .where(
                table.c.run_id == run_id,
                table.c.weight_version == to - 1,
                table.c.state.in_(sorted(ACTIVE_STATES)),
            )
            .values(
                weight_version=to,
                groups_consumed=table.c.groups_consumed + num_groups,
                updated_at=self._clock.now(),
            )
        )
        if not changed.rowcount:
            raise Conflict(f"run {run_id} is over, or not at version {to - 1}")

    async def consumed(self, run_id: str) -> Consumed:
        """Every episode and group that the run took for good."""
        table = tables.consumed
        query = select(table.c.episode_id, table.c.attempt, table.c.group_id).where(table.c.run_id == run_id)
        async with reading(self._engine) as connection:
            rows = (await connection.execute(query)).all()
        return Consumed(
            attempts={row.episode_id: row.attempt for row in rows},
            group_ids=frozenset(row.group_id for row in rows),
        )

    async def steps(self, run_id: str, *, last: int | None = None) -> list[StepRecord]:
        """Committed steps in order; only the newest `last` where given."""
        table = tables.steps
        query = select(table).where(table.c.run_id == run_id).order_by(table.c.step.desc())
        if last is not None:
            query = query.limit(last)
        async with reading(self._engine) as connection:
            rows = (await connection.execute(query)).all()
        return [
            StepRecord(
                step=row.step,
                metrics=row.metrics_json,
                publish=row.publish_json,
                committed_at=row.committed_at,
            )
            for row in reversed(rows)
        ]

    async def note_unpublished(self, run_id: str, error: str) -> None:
        """Say why the last version is not served, where no try to publish it has said so."""
        table = tables.runs
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(table)
                .where(table.c.run_id == run_id, table.c.publish_error == "")
                .where(table.c.published_version.is_distinct_from(table.c.weight_version))
                .values(publish_error=error)
            )

    async def over(self, *, since: datetime | None) -> list[str]:
        """Ids of the runs that are over, oldest first; only those that ended at `since` or later."""
        table = tables.runs
        query = (
            select(table.c.run_id)
            .where(table.c.state.in_(sorted(TERMINAL_STATES)))
            .order_by(table.c.created_at, table.c.run_id)
        )
        if since is not None:
            query = query.where(table.c.updated_at >= since)
        async with reading(self._engine) as connection:
            return list((await connection.execute(query)).scalars())

    async def record_publish(
        self, run_id: str, weight_version: int, *, ok: bool, error: str, publish: Mapping[str, Any]
    ) -> None:
        """Record a try to publish: on the run, and on the step that made the version."""
        values: dict[str, Any] = {"publish_error": error}
        if ok:
            values["published_version"] = weight_version
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(tables.runs).where(tables.runs.c.run_id == run_id).values(**values)
            )
            await connection.execute(
                update(tables.steps)
                .where(tables.steps.c.run_id == run_id, tables.steps.c.step == weight_version)
                .values(publish_json=dict(publish))
            )


async def _run(connection: AsyncConnection, run_id: str) -> RunRecord:
    row = (await connection.execute(select(tables.runs).where(tables.runs.c.run_id == run_id))).first()
    if row is None:
        raise NotFound(f"run {run_id} is not known")
    return _run_record(row)


async def _set_state(
    connection: AsyncConnection,
    clock: Clock,
    run_id: str,
    allowed: Collection[RunState],
    to: RunState,
    error: str,
) -> bool:
    table = tables.runs
    changed = await connection.execute(
        update(table)
        .where(table.c.run_id == run_id, table.c.state.in_(sorted(allowed)))
        .values(state=to, error=error, updated_at=clock.now())
    )
    return bool(changed.rowcount)


async def _insert_consumed(
    connection: AsyncConnection, run_id: str, step: int | None, episodes: Iterable[ConsumedEpisode]
) -> None:
    values = [{"run_id": run_id, "step": step, **asdict(episode)} for episode in episodes]
    if values:
        await connection.execute(insert(tables.consumed), values)


def _run_record(row: Row[Any]) -> RunRecord:
    return RunRecord(
        run_id=row.run_id,
        state=RunState(row.state),
        error=row.error,
        spec=spec_from_json(row.spec_json),
        weight_version=row.weight_version,
        published_version=row.published_version,
        publish_error=row.publish_error,
        groups_consumed=row.groups_consumed,
        batches_discarded=row.batches_discarded,
        duplicates_refused=row.duplicates_refused,
        superseded_refused=row.superseded_refused,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
