"""Weights on record: what is served, who may change it, and every load on an engine."""

from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from practicum.db.engine import reading, transaction
from services.rollout.engine.records import LeaseLost, Load, LoadState, Serving, WeightsView
from services.rollout.store.tables import replicas, serving, weight_loads, weights_lease

_KEPT_LOADS = 1000  # settled ones; no generation is under way for so many


class WeightStore:
    """`WeightRecords` in SQL."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def look(self) -> WeightsView:
        """Everything but the loads that are settled."""
        pending = select(weight_loads.c.engine_url).where(weight_loads.c.state == LoadState.PENDING)
        async with reading(self._engine) as connection:
            served = (await connection.execute(select(serving))).one_or_none()
            holder = (await connection.execute(select(weights_lease.c.holder))).scalar_one()
            pending_urls = frozenset((await connection.execute(pending)).scalars())
        return WeightsView(
            serving=None if served is None else _serving(served, label=served.label),
            is_proven=served is not None and served.is_proven,
            fence=-1 if served is None else served.fence,
            holder=holder,
            pending_urls=pending_urls,
        )

    async def take_lease(self, holder: str) -> int | None:
        """The fence of a lease taken now; None = another replica, which is alive, holds it."""
        async with transaction(self._engine) as connection:
            held = (await connection.execute(select(weights_lease).with_for_update())).one()
            if held.holder not in ("", holder):
                alive = select(replicas.c.instance).where(replicas.c.instance == held.holder)
                if (await connection.execute(alive)).first() is not None:
                    return None
            fence = int(held.fence) + 1
            await connection.execute(update(weights_lease).values(holder=holder, fence=fence))
        return fence

    async def give_lease_back(self, fence: int) -> None:
        """Free the lease; one that was lost is no error."""
        async with transaction(self._engine) as connection:
            await connection.execute(
                update(weights_lease).where(weights_lease.c.fence == fence).values(holder="")
            )

    async def begin_load(self, fence: int, engine_url: str, weights: Serving) -> str:
        """Put a pending load on record; its label, never used before."""
        async with transaction(self._engine) as connection:
            load_id = await _hold(connection, fence) + 1
            label = f"{weights.weight_version}.{load_id}"
            await _fail_pending(connection, engine_url)  # this one stands for them
            await connection.execute(update(weights_lease).values(num_loads=load_id))
            await connection.execute(
                delete(weight_loads).where(
                    weight_loads.c.load_id < load_id - _KEPT_LOADS, weight_loads.c.state != LoadState.PENDING
                )
            )
            await connection.execute(
                insert(weight_loads).values(
                    label=label,
                    load_id=load_id,
                    engine_url=engine_url,
                    run_id=weights.run_id,
                    weight_version=weights.weight_version,
                    path=weights.path,
                    manifest_sha256=weights.manifest_sha256,
                    state=LoadState.PENDING,
                )
            )
        return label

    async def conclude(self, fence: int, label: str, state: LoadState) -> None:
        """Settle a load. A refused one takes back what was taken for proven without probes."""
        async with transaction(self._engine) as connection:
            await _hold(connection, fence)
            if state is LoadState.REFUSED:
                query = select(weight_loads).where(weight_loads.c.label == label)
                refused = (await connection.execute(query)).one()
                await connection.execute(
                    update(weight_loads)
                    .where(
                        weight_loads.c.run_id == refused.run_id,
                        weight_loads.c.weight_version == refused.weight_version,
                        weight_loads.c.state == LoadState.PROVEN,
                    )
                    .values(state=LoadState.REFUSED)
                )
            await connection.execute(
                update(weight_loads).where(weight_loads.c.label == label).values(state=state)
            )

    async def serve(self, fence: int, weights: Serving, *, is_proven: bool) -> None:
        """Replace what is served."""
        async with transaction(self._engine) as connection:
            await _hold(connection, fence)
            await connection.execute(delete(serving))
            await connection.execute(
                insert(serving).values(
                    only_row=True,
                    run_id=weights.run_id,
                    weight_version=weights.weight_version,
                    label=weights.label,
                    path=weights.path,
                    manifest_sha256=weights.manifest_sha256,
                    is_proven=is_proven,
                    fence=fence,
                )
            )

    async def find(self, label: str) -> Load | None:
        """The load behind a label; None = no replica gave that name."""
        query = select(weight_loads).where(weight_loads.c.label == label)
        async with reading(self._engine) as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        return Load(
            label=row.label, engine_url=row.engine_url, weights=_serving(row), state=LoadState(row.state)
        )

    async def is_refused(self, run_id: str, weight_version: int) -> bool:
        """Whether probes spoke against the version and it was not proven since."""
        query = (
            select(weight_loads.c.state)
            .where(weight_loads.c.run_id == run_id, weight_loads.c.weight_version == weight_version)
            .distinct()
        )
        async with reading(self._engine) as connection:
            states = set((await connection.execute(query)).scalars())
        return LoadState.REFUSED in states and LoadState.PROVEN not in states


async def _fail_pending(connection: AsyncConnection, engine_url: str) -> None:
    await connection.execute(
        update(weight_loads)
        .where(weight_loads.c.engine_url == engine_url, weight_loads.c.state == LoadState.PENDING)
        .values(state=LoadState.FAILED)
    )


async def _hold(connection: AsyncConnection, fence: int) -> int:
    """Keep the lease from changing hands until the transaction ends; the loads begun so far."""
    query = select(weights_lease.c.num_loads).where(weights_lease.c.fence == fence).with_for_update()
    num_loads = (await connection.execute(query)).scalar_one_or_none()
    if num_loads is None:
        raise LeaseLost("another replica changes the weights by now")
    return int(num_loads)


def _serving(row: Row[Any], *, label: str = "") -> Serving:
    return Serving(
        run_id=row.run_id,
        weight_version=row.weight_version,
        path=row.path,
        manifest_sha256=row.manifest_sha256,
        label=label,
    )
