"""What the trainer's store promises, on SQLite and on PostgreSQL alike."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from practicum.clock import SystemClock
from practicum.db.engine import transaction
from practicum.db.migrate import downgrade, is_current, upgrade
from practicum.errors import Conflict, InvalidInput, NotFound
from services.trainer.checkpoints.folders import WrittenCheckpoint
from services.trainer.spec import RunState
from services.trainer.store import MIGRATIONS, TrainerStore, open_store
from services.trainer.store.records import ConsumedEpisode, Cursor, QuarantineRecord
from tests.fixtures.trainer import rl_spec


class HeldClock(SystemClock):
    """A clock that stands still, so that many rows share one time."""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/trainer.sqlite"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[TrainerStore]:
    await asyncio.to_thread(upgrade, database_url, MIGRATIONS)
    opened = open_store(database_url, HeldClock())
    yield opened
    await opened.engine.dispose()


def written(version: int) -> WrittenCheckpoint:
    return WrittenCheckpoint(
        weight_version=version, folder=Path(f"/c/v{version}"), manifest_sha256="ab" * 32, size_bytes=2**40
    )


def episode(number: int, *, attempt: int = 1, reward: float | None = 1.0) -> ConsumedEpisode:
    return ConsumedEpisode(
        episode_id=f"ep_{number}",
        trajectory_id=f"ep_{number}-{attempt}",
        attempt=attempt,
        group_id=f"group_{number // 2}",
        task_id="task",
        trained=reward is not None,
        reward=reward,
    )


async def running(store: TrainerStore) -> str:
    """A run that is at version 0."""
    run = await store.runs.create(rl_spec())
    assert (await store.runs.claim_next()) is not None
    await store.runs.commit_base(run.run_id, written(0))
    return run.run_id


def test_migrations_when_applied_give_the_tables_of_the_code_and_can_be_taken_back(database_url: str) -> None:
    upgrade(database_url, MIGRATIONS)
    assert is_current(database_url, MIGRATIONS)
    downgrade(database_url, MIGRATIONS)
    upgrade(database_url, MIGRATIONS)
    assert is_current(database_url, MIGRATIONS)


async def test_create_when_stored_comes_back_whole(store: TrainerStore) -> None:
    spec = rl_spec(num_steps=7, temperature=0.7)
    run = await store.runs.create(spec)
    assert await store.runs.get(run.run_id) == run
    assert (run.spec, run.state, run.weight_version, run.published_version) == (
        spec,
        RunState.PENDING,
        -1,
        None,
    )
    with pytest.raises(NotFound):
        await store.runs.get("run_of_nobody")


async def test_F08_create_when_the_key_repeats_makes_one_run(store: TrainerStore) -> None:
    made = await asyncio.gather(*(store.runs.create(rl_spec(), key="k", digest="d") for _ in range(20)))
    assert len({run.run_id for run in made}) == 1
    assert len(await store.runs.in_states(set())) == 1
    with pytest.raises(InvalidInput) as refused:
        await store.runs.create(rl_spec(), key="k", digest="other")
    assert refused.value.field == "Idempotency-Key"


async def test_claim_next_when_runs_wait_takes_the_running_one_then_the_oldest(store: TrainerStore) -> None:
    first, second = [await store.runs.create(rl_spec()) for _ in range(2)]
    for _ in range(2):  # a restart finds the same one
        claimed = await store.runs.claim_next()
        assert claimed is not None
        assert (claimed.run_id, claimed.state) == (first.run_id, RunState.RUNNING)
    await store.runs.change_state(first.run_id, RunState.PAUSED, allowed={RunState.RUNNING})
    claimed = await store.runs.claim_next()
    assert claimed is not None
    assert claimed.run_id == second.run_id


@pytest.mark.parametrize("terminal", [RunState.COMPLETED, RunState.STOPPED, RunState.FAILED])
async def test_F09_change_state_when_the_run_is_over_never_changes_it(
    store: TrainerStore, terminal: RunState
) -> None:
    run_id = await running(store)
    await store.runs.change_state(run_id, terminal, allowed={RunState.RUNNING}, error="why")
    for state in RunState:
        with pytest.raises(Conflict, match=str(terminal)):
            await store.runs.change_state(run_id, state, allowed={RunState.RUNNING, RunState.PAUSED})
    with pytest.raises(Conflict):
        await store.runs.commit_step(run_id, written=written(1), episodes=[], num_groups=1, metrics={})
    run = await store.runs.get(run_id)
    assert (run.state, run.error, run.weight_version) == (terminal, "why", 0)


async def test_change_state_when_it_holds_already_is_no_error(store: TrainerStore) -> None:
    run_id = await running(store)
    run = await store.runs.change_state(
        run_id, RunState.PENDING, allowed={RunState.PAUSED}, already={RunState.RUNNING}
    )
    assert run.state is RunState.RUNNING


async def test_commit_step_when_it_commits_records_everything_at_once(store: TrainerStore) -> None:
    run_id = await running(store)
    members = [episode(0), episode(1, attempt=2, reward=None)]
    made = await store.runs.commit_step(
        run_id, written=written(1), episodes=members, num_groups=1, metrics={"loss": 0.5, "note": "nul \x00"}
    )
    run = await store.runs.get(run_id)
    assert (run.weight_version, run.groups_consumed) == (1, 1)
    (step,) = await store.runs.steps(run_id)
    assert (step.step, step.metrics, step.publish) == (1, {"loss": 0.5, "note": "nul \x00"}, None)
    consumed = await store.runs.consumed(run_id)
    assert consumed.attempts == {"ep_0": 1, "ep_1": 2}
    assert consumed.group_ids == {"group_0"}
    assert await store.checkpoints.of_run(run_id, None) == made
    assert (made.weight_version, made.size_bytes) == (1, 2**40)


async def test_commit_step_when_an_episode_was_trained_before_changes_nothing(store: TrainerStore) -> None:
    run_id = await running(store)
    await store.runs.commit_step(run_id, written=written(1), episodes=[episode(0)], num_groups=1, metrics={})
    with pytest.raises(IntegrityError):
        await store.runs.commit_step(
            run_id, written=written(2), episodes=[episode(1), episode(0, attempt=2)], num_groups=1, metrics={}
        )
    run = await store.runs.get(run_id)
    assert (run.weight_version, run.groups_consumed) == (1, 1)
    assert (await store.runs.consumed(run_id)).attempts == {"ep_0": 1}
    assert len(await store.runs.steps(run_id)) == 1
    assert (await store.checkpoints.of_run(run_id, None)).weight_version == 1


@pytest.mark.parametrize("version", [0, 1, 3])
async def test_commit_step_when_the_version_does_not_follow_refuses(
    store: TrainerStore, version: int
) -> None:
    run_id = await running(store)
    await store.runs.commit_step(run_id, written=written(1), episodes=[], num_groups=1, metrics={})
    with pytest.raises(Conflict):
        await store.runs.commit_step(run_id, written=written(version), episodes=[], num_groups=1, metrics={})


async def test_commit_step_when_two_commit_the_same_step_lets_one_through(store: TrainerStore) -> None:
    run_id = await running(store)
    results = await asyncio.gather(
        *(
            store.runs.commit_step(
                run_id, written=written(1), episodes=[episode(number)], num_groups=1, metrics={}
            )
            for number in range(4)
        ),
        return_exceptions=True,
    )
    assert sum(isinstance(result, Conflict) for result in results) == 3
    assert len((await store.runs.consumed(run_id)).attempts) == 1


async def test_discard_batch_when_done_consumes_without_a_step(store: TrainerStore) -> None:
    run_id = await running(store)
    await store.runs.discard_batch(run_id, episodes=[episode(0, reward=None)], num_groups=1)
    run = await store.runs.get(run_id)
    assert (run.weight_version, run.groups_consumed, run.batches_discarded) == (0, 1, 1)
    assert (await store.runs.consumed(run_id)).attempts == {"ep_0": 1}


async def test_record_publish_when_it_fails_then_works_shows_both(store: TrainerStore) -> None:
    run_id = await running(store)
    await store.runs.commit_step(run_id, written=written(1), episodes=[], num_groups=1, metrics={})
    await store.runs.record_publish(
        run_id, 1, ok=False, error="e0: refused", publish={"error": "e0: refused"}
    )
    run = await store.runs.get(run_id)
    assert (run.published_version, run.publish_error) == (None, "e0: refused")
    await store.runs.record_publish(run_id, 1, ok=True, error="", publish={"seconds": 0.5})
    run = await store.runs.get(run_id)
    assert (run.published_version, run.publish_error) == (1, "")
    assert (await store.runs.steps(run_id))[0].publish == {"seconds": 0.5}


async def test_note_unpublished_when_a_try_said_why_leaves_its_word(store: TrainerStore) -> None:
    run_id = await running(store)
    await store.runs.record_publish(run_id, 0, ok=True, error="", publish={})
    await store.runs.note_unpublished(run_id, "given up")
    assert (await store.runs.get(run_id)).publish_error == ""  # it is served
    await store.runs.commit_step(run_id, written=written(1), episodes=[], num_groups=1, metrics={})
    await store.runs.note_unpublished(run_id, "given up")
    assert (await store.runs.get(run_id)).publish_error == "given up"
    await store.runs.record_publish(run_id, 1, ok=False, error="e0: refused", publish={})
    await store.runs.note_unpublished(run_id, "given up")
    assert (await store.runs.get(run_id)).publish_error == "e0: refused"


async def test_over_when_asked_since_a_time_gives_what_ended_after_it(store: TrainerStore) -> None:
    ended, going = await running(store), (await store.runs.create(rl_spec())).run_id
    run = await store.runs.change_state(ended, RunState.STOPPED, allowed={RunState.RUNNING})
    assert going not in await store.runs.over(since=None)
    assert await store.runs.over(since=None) == [ended]
    assert await store.runs.over(since=run.updated_at) == [ended]
    assert await store.runs.over(since=run.updated_at + timedelta(seconds=1)) == []


async def test_retire_when_done_leaves_the_record_but_not_among_the_kept(store: TrainerStore) -> None:
    run_id = await running(store)
    await store.runs.commit_step(run_id, written=written(1), episodes=[], num_groups=1, metrics={})
    await store.checkpoints.retire(run_id, [0])
    assert [held.weight_version for held in await store.checkpoints.kept(run_id)] == [1]
    assert (await store.checkpoints.of_run(run_id, 0)).retired_at is not None
    with pytest.raises(NotFound):
        await store.checkpoints.of_run(run_id, 7)


async def test_F10_page_when_rows_share_a_time_and_others_are_inserted_sees_each_once(
    store: TrainerStore,
) -> None:
    before = {(await store.runs.create(rl_spec())).run_id for _ in range(50)}
    seen: list[str] = []
    after = None
    while True:
        page = await store.runs.page(limit=20, after=after, state=None)
        seen += [run.run_id for run in page]
        if len(page) < 20:
            break
        after = Cursor(created_at=page[-1].created_at, row_id=page[-1].run_id)
        for _ in range(5 if len(seen) == 20 else 0):
            await store.runs.create(rl_spec())
    assert len(seen) == len(set(seen))
    assert before <= set(seen)


async def test_quarantine_when_the_event_repeats_keeps_one(store: TrainerStore) -> None:
    run_id = await running(store)

    def record(number: int) -> QuarantineRecord:
        return QuarantineRecord(
            quarantine_id=f"quar_{number}",
            run_id=run_id,
            event_id="event",
            trajectory_id="ep_0-1",
            episode_id="ep_0",
            group_id="group_0",
            reason="vocabulary",
            message="token id 99 is outside [0, 64)",
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )

    assert await store.quarantine.add(record(1), b"\x00bytes")
    assert not await store.quarantine.add(record(2), b"\x00bytes")
    assert await store.quarantine.page(run_id, limit=10, after=None) == [record(1)]
    assert await store.quarantine.count([run_id, "run_2"]) == {run_id: 1, "run_2": 0}
    assert await store.quarantine.payload("ep_0-1") == b"\x00bytes"
    assert await store.quarantine.payload("ep_9-1") is None


async def test_open_store_when_it_is_sqlite_syncs_every_commit(tmp_path: Path) -> None:
    opened = open_store(f"sqlite:///{tmp_path}/x.sqlite", SystemClock())
    async with transaction(opened.engine) as connection:
        assert (await connection.execute(text("PRAGMA synchronous"))).scalar() == 2
    await opened.engine.dispose()
