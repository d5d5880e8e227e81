"""Who is alive, judged without any two clocks agreeing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.db.engine import create_engine
from practicum.errors import Conflict
from services.rollout.scheduler.membership import Membership
from services.rollout.store.replicas import ReplicaStore
from services.rollout.store.weights import WeightStore
from tests.fixtures.rollout import ManualClock, until
from tests.fixtures.rollout_store import migrated


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(migrated(tmp_path))
    yield engine
    await engine.dispose()


class Replica:
    """A replica whose time a test holds."""

    def __init__(self, database: AsyncEngine, name: str, life: str = "1") -> None:
        self.clock = ManualClock()
        self.told: list[str] = []
        self.membership = Membership(
            ReplicaStore(database), instance=name, life=f"{name}-{life}", clock=self.clock
        )
        self.membership.on_change.append(lambda: self.told.append("change"))
        self.membership.on_lost.append(lambda: self.told.append("lost"))

    async def join(self) -> None:
        await self.membership.join()

    async def round(self, seconds: float = 3.0) -> None:
        self.clock.now_s += seconds
        await self.membership.round()


async def test_replica_when_it_falls_silent_is_removed_once_and_its_lease_is_free(
    database: AsyncEngine,
) -> None:
    a, b, c = (Replica(database, name) for name in "abc")
    for replica in (a, b, c):
        await replica.join()
    weights = WeightStore(database)
    assert await weights.take_lease("c") is not None
    await a.round()
    await b.round()
    assert [replica.membership.num_live for replica in (a, b)] == [3, 3]
    assert [replica.membership.leads for replica in (a, b, c)] == [True, False, False]
    assert a.membership.share(7) == 3
    assert (a.membership.came_first, b.membership.came_first) == (True, False)
    for _ in range(4):
        await a.round()
        await b.round()
    assert a.membership.num_live == 3
    assert await weights.take_lease("a") is None
    await a.round()
    await b.round()
    assert [replica.membership.num_live for replica in (a, b)] == [2, 2]
    assert a.told[-1] == "change"
    assert await weights.take_lease("a") is not None


async def test_replica_when_it_was_only_slow_owns_nothing_and_joins_again(database: AsyncEngine) -> None:
    a, b = Replica(database, "a"), Replica(database, "b")
    await a.join()
    await b.join()
    for _ in range(6):
        await a.round()
    assert a.membership.is_alone
    await b.round(60)
    assert b.told.count("lost") == 1
    await b.round()
    await a.round()
    assert (a.membership.num_live, b.membership.num_live) == (2, 2)
    assert b.told.count("lost") == 1


async def test_replica_when_it_stood_still_itself_judges_nobody(database: AsyncEngine) -> None:
    a, b = Replica(database, "a"), Replica(database, "b")
    await a.join()
    await b.join()
    await a.round()
    await a.round(3600)  # both stood still, as where the database was away
    assert a.membership.num_live == 2
    await b.round(3600)
    assert b.told == ["change"] or b.told == []
    await a.round()
    assert a.membership.num_live == 2


async def test_replica_when_another_process_has_its_name_ends(database: AsyncEngine) -> None:
    a, again = Replica(database, "a"), Replica(database, "a", life="2")
    await a.join()
    await again.join()
    await again.round()
    with pytest.raises(Conflict, match="PRACTICUM_ROLLOUT_INSTANCE"):
        await a.round()


async def test_membership_when_left_gives_everything_up(database: AsyncEngine) -> None:
    a, b = Replica(database, "a"), Replica(database, "b")
    async with a.membership.kept():
        await b.join()
        assert b.membership.num_live == 2
        await a.membership.leave()
    await b.round()
    assert b.membership.is_alone


async def test_membership_when_the_database_is_away_goes_on(database: AsyncEngine) -> None:
    class Flaky(ReplicaStore):
        num_failures = 3

        async def beat(self, beat):  # type: ignore[no-untyped-def]
            if self.num_failures and beat.num_beats > 1:
                self.num_failures -= 1
                raise OperationalError("UPDATE", {}, Exception("away"))
            return await super().beat(beat)

    clock, store = ManualClock(), Flaky(database)
    membership = Membership(store, instance="a", life="a", clock=clock, interval_s=0.01)
    other = Replica(database, "b")
    async with membership.kept():
        await other.join()
        await until(lambda: not membership.is_alone)
        assert store.num_failures == 0
