"""What the reward service's store promises, on SQLite and on PostgreSQL alike."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from practicum.db.engine import create_engine
from practicum.db.migrate import downgrade, is_current, upgrade
from practicum.errors import NotFound
from practicum.trajectory import Grade, GradeComponent, Outcome, TestResult
from services.reward.store import MIGRATIONS
from services.reward.store.grades import GradeStore, StoredGrade

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/reward.sqlite"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[GradeStore]:
    await asyncio.to_thread(upgrade, database_url, MIGRATIONS)
    engine = create_engine(database_url)
    yield GradeStore(engine)
    await engine.dispose()


def stored(
    number: int, *, reward: float | None = 1.0, run_id: str = "run_1", seconds: float = 0
) -> StoredGrade:
    return StoredGrade(
        trajectory_id=f"ep_{number}-1",
        run_id=run_id,
        task_id="task_1",
        outcome=Outcome.COMPLETED if reward is not None else Outcome.INFRA_FAILED,
        grade=Grade(
            reward=reward,
            components=(GradeComponent(name="tests", value=reward or 0.0),),
            tests=(TestResult(test_id="t.py::test_a", status="failed", message="assert '\0' == '\ud800'"),),
            evidence=("it says \0 \udcff",),
            grader="tests",
            grader_version="1",
            sandbox_backend="bubblewrap",
            seconds=0.25,
        ),
        created_at=START + timedelta(seconds=seconds),
    )


async def test_a_grade_comes_back_as_it_was(store: GradeStore) -> None:
    for number, reward in enumerate((1.0, 0.0, None)):
        await store.put(stored(number, reward=reward))
        assert await store.get(f"ep_{number}-1") == stored(number, reward=reward)


async def test_the_first_grade_of_a_trajectory_counts(store: GradeStore) -> None:
    assert await store.put(stored(1, reward=1.0)) == stored(1, reward=1.0)
    assert await store.put(stored(1, reward=0.0)) == stored(1, reward=1.0)
    assert (await store.get("ep_1-1")).grade.reward == 1.0


async def test_two_at_once_agree_on_one_grade(store: GradeStore) -> None:
    kept = await asyncio.gather(*(store.put(stored(1, reward=float(n % 2))) for n in range(6)))
    assert len({one.grade.reward for one in kept}) == 1


async def test_an_unknown_trajectory_has_no_grade(store: GradeStore) -> None:
    assert await store.find("ep_9-1") is None
    with pytest.raises(NotFound, match="ep_9-1"):
        await store.get("ep_9-1")


async def test_pages_neither_skip_nor_repeat(store: GradeStore) -> None:
    for number in range(7):
        await store.put(stored(number, run_id=f"run_{number % 2}", seconds=number // 3))
    seen: list[str] = []
    after = None
    while page := await store.page(run_id=None, after=after, limit=3):
        seen += [one.trajectory_id for one in page]
        after = (page[-1].created_at, page[-1].trajectory_id)
    assert seen == [f"ep_{number}-1" for number in range(7)]
    only = await store.page(run_id="run_1", after=None, limit=10)
    assert [one.trajectory_id for one in only] == ["ep_1-1", "ep_3-1", "ep_5-1"]


async def test_migrations_match_the_code_and_go_back(database_url: str) -> None:
    await asyncio.to_thread(upgrade, database_url, MIGRATIONS)
    assert await asyncio.to_thread(is_current, database_url, MIGRATIONS)
    await asyncio.to_thread(downgrade, database_url, MIGRATIONS)
    await asyncio.to_thread(upgrade, database_url, MIGRATIONS)
