"""What the rollout service's tables promise, on SQLite and PostgreSQL alike."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from practicum.db.engine import create_engine
from practicum.db.migrate import downgrade, is_current, upgrade
from practicum.errors import Conflict, InvalidInput, NotFound
from practicum.trajectory import Outcome
from services.rollout.engine.records import LeaseLost, Load, LoadState, Serving
from services.rollout.main import MIGRATIONS
from services.rollout.store.claims import ClaimStore, Whose
from services.rollout.store.demonstrations import (
    DemonstrationSet,
    DemonstrationState,
    DemonstrationStore,
    ScriptedTurn,
)
from services.rollout.store.episodes import Ending, EpisodeState, EpisodeStore, GradeNote, NewEpisode
from services.rollout.store.evaluations import Evaluation, EvaluationState, EvaluationStore
from services.rollout.store.replicas import Beat, ReplicaStore
from services.rollout.store.suites import Creation, Suite, SuiteStore
from services.rollout.store.weights import WeightStore
from services.rollout.tasks import Split, Task, TaskState

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/rollout.sqlite"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    await asyncio.to_thread(upgrade, database_url, MIGRATIONS)
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


def make_task(name: str = "one", **changes: object) -> Task:
    task = Task(
        task_id=f"task_{name}",
        suite_id="suite_1",
        position=0,
        name=name,
        split=Split.TRAIN,
        instruction="Fix calc.py \ud7ff\U0001f600.",
        tools=("read_file",),
        tags=("kind:x",),
        session_wall_s=0.0,
        spec=b"\x00\xff",
        reference=None,
        state=TaskState.ADMITTED,
    )
    return replace(task, **changes)  # type: ignore[arg-type]


def creation(key: str | None = None, digest: str = "d", response: str = "{}") -> Creation:
    return Creation(key=key, body_digest=digest, response_json=response, now=NOW)


SUITE = Suite(suite_id="suite_1", name="bugs", version="1", body_digest="d", created_at=NOW)


async def with_tasks(engine: AsyncEngine, *tasks: Task) -> SuiteStore:
    store = SuiteStore(engine)
    await store.add_suite(SUITE, tasks or (make_task(),), creation())
    return store


def member(number: int = 0, **changes: object) -> NewEpisode:
    episode = NewEpisode(
        episode_id=f"ep_{number}",
        task_id="task_one",
        run_id="run_1",
        group_id="grp_1",
        group_index=0,
        group_size=2,
        position=number,
    )
    return replace(episode, **changes)  # type: ignore[arg-type]


def ending(number: int = 0, **changes: object) -> Ending:
    value = Ending(
        episode_id=f"ep_{number}",
        attempt=1,
        trajectory_id=f"ep_{number}-1",
        state=EpisodeState.GRADING,
        outcome=Outcome.COMPLETED,
        error="",
        trajectory=b"t\x00",
        diff=b"d",
        num_turns=3,
        num_sampled_tokens=30,
        is_owed=False,
    )
    return replace(value, **changes)  # type: ignore[arg-type]


def note(number: int = 0, reward: float | None = 1.0, attempt: int = 1) -> GradeNote:
    return GradeNote(
        episode_id=f"ep_{number}",
        attempt=attempt,
        outcome=Outcome.COMPLETED,
        reward=reward,
        grade=b"g",
        error="" if reward is not None else "no sandbox\x00",
    )


EVALUATION = Evaluation(
    evaluation_id="eval_1",
    suite_id="suite_1",
    request={"suite": "bugs", "seed": 3},
    state=EvaluationState.RUNNING,
    weight_version=None,
    engine_utilisation=None,
    created_at=NOW,
    finished_at=None,
)
OF_RUN = Whose(run_id="run_1")


async def join(engine: AsyncEngine, *instances: str) -> list[bool]:
    store = ReplicaStore(engine)
    return [await store.join(beat_of(instance), NOW) for instance in instances]


def beat_of(instance: str, num_beats: int = 0) -> Beat:
    return Beat(instance=instance, life=f"life of {instance}", num_beats=num_beats)


async def with_group(engine: AsyncEngine, size: int = 2) -> EpisodeStore:
    await with_tasks(engine)
    await join(engine, "a")
    store = EpisodeStore(engine, "a")
    await store.bind_run("run_1", "suite_1", NOW)
    assert await store.create_group("run_1", 0, [member(number) for number in range(size)], NOW)
    return store


def test_migrations_when_run_up_and_down_leave_the_schema_of_the_code(database_url: str) -> None:
    upgrade(database_url, MIGRATIONS)
    assert is_current(database_url, MIGRATIONS)
    downgrade(database_url, MIGRATIONS)
    upgrade(database_url, MIGRATIONS)
    assert is_current(database_url, MIGRATIONS)


async def test_suite_when_stored_gives_its_tasks_back(engine: AsyncEngine) -> None:
    held = make_task("two", split=Split.HELDOUT, position=1, reference=b"ref", state=TaskState.ADMITTING)
    store = await with_tasks(engine, make_task(), held)
    assert await store.get_task("task_two") == held
    assert await store.admitted_ids("suite_1", Split.TRAIN) == ["task_one"]
    assert await store.num_admitting("suite_1") == 1
    assert (await store.counts(["suite_1"]))["suite_1"] == {
        (Split.TRAIN, TaskState.ADMITTED): 1,
        (Split.HELDOUT, TaskState.ADMITTING): 1,
    }
    for reference in ("suite_1", "bugs", "bugs@1"):
        assert await store.find(reference) == SUITE
    assert await store.find("bugs@2") is None
    with pytest.raises(InvalidInput, match="suite"):
        await store.require("other", field="suite")
    with pytest.raises(NotFound):
        await store.get_task("task_none")


async def test_suite_when_its_version_exists_is_refused_whole(engine: AsyncEngine) -> None:
    store = await with_tasks(engine)
    again = replace(SUITE, suite_id="suite_2")
    with pytest.raises(Conflict):
        await store.add_suite(again, [make_task("x", suite_id="suite_2")], creation())
    with pytest.raises(NotFound):
        await store.get_task("task_x")


async def test_suite_when_two_versions_exist_is_found_newest_first(engine: AsyncEngine) -> None:
    store = await with_tasks(engine)
    newer = replace(SUITE, suite_id="suite_2", version="2", created_at=NOW + timedelta(seconds=1))
    await store.add_suite(newer, [make_task("x", suite_id="suite_2")], creation())
    assert await store.find("bugs") == newer
    assert await store.find("bugs@1") == SUITE


async def test_verdict_when_given_twice_stands(engine: AsyncEngine) -> None:
    store = await with_tasks(engine, make_task(state=TaskState.ADMITTING))
    assert await store.admitting_ids("a") == ["task_one"]
    await store.set_verdict("task_one", admitted=False, reasons=[{"name": "leak", "ok": False}])
    await store.set_verdict("task_one", admitted=True, reasons=[])
    task = await store.get_task("task_one")
    assert task.state is TaskState.REJECTED
    assert task.reasons == ({"name": "leak", "ok": False},)
    assert await store.admitting_ids("a") == []


async def test_run_when_bound_keeps_its_suite(engine: AsyncEngine) -> None:
    suites = await with_tasks(engine)
    newer = replace(SUITE, suite_id="suite_2", version="2")
    await suites.add_suite(newer, [make_task("x", suite_id="suite_2")], creation())
    store = EpisodeStore(engine, "a")
    bound = await asyncio.gather(*(store.bind_run("run_1", "suite_1", NOW) for _ in range(4)))
    assert set(bound) == {"suite_1"}
    assert await store.bind_run("run_1", "suite_2", NOW) == "suite_1"


async def test_group_when_created_is_its_replicas_until_its_episodes_end(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    claims = ClaimStore(engine, "a")
    assert await store.num_groups("run_1") == 1
    assert await store.num_groups("run_2") == 0
    assert await store.get("ep_0") == member(0).stored(NOW, "a")
    assert await store.num_running("run_1") == 2
    assert await claims.num_unowned(OF_RUN) == 0
    assert await store.runs_with_unplayed() == ["run_1"]
    assert await store.end(ending(0), NOW)
    assert await store.num_running("run_1") == 1
    assert await claims.own_running(before=NOW + timedelta(seconds=1)) == ["ep_1"]
    assert await claims.own_running(before=NOW) == []
    assert await store.trajectory("ep_0", 1) == (b"t\x00", b"d")
    assert await store.trajectory("ep_1", 1) is None


async def test_group_when_two_replicas_store_the_same_index_is_one_replicas(engine: AsyncEngine) -> None:
    await with_group(engine)
    await join(engine, "b", "c")
    stores = [EpisodeStore(engine, name) for name in ("a", "b", "c")]

    async def create(number: int) -> bool:
        members = [member(10 * number + i, group_id=f"new_{number}", group_index=1) for i in range(1, 3)]
        return await stores[number - 1].create_group("run_1", 1, members, NOW)

    made = await asyncio.gather(*(create(number) for number in (1, 2, 3)))
    assert sorted(made) == [False, False, True]
    winner = made.index(True)
    found = await stores[0].list_episodes(
        run_id="run_1", evaluation_id=None, state=None, after=None, limit=99
    )
    assert [e.owner for e in found if e.group_index == 1] == ["abc"[winner]] * 2
    with pytest.raises(IntegrityError):
        await stores[0].create_group("run_none", 1, [member(99, group_id="grp_9")], NOW)


async def test_episodes_when_claimed_by_two_at_once_are_each_played_by_one(engine: AsyncEngine) -> None:
    await with_tasks(engine)
    await join(engine, "a", "b", "c")
    members = [member(number, run_id="", evaluation_id="eval_1") for number in range(30)]
    await EvaluationStore(engine).create(EVALUATION, members, creation())
    whose = Whose(evaluation_id="eval_1")
    claims = {name: ClaimStore(engine, name) for name in ("a", "b", "c")}
    taken: dict[str, str] = {}

    async def claim(name: str) -> None:
        for episode in await claims[name].claim(whose, 4, NOW):
            assert (episode.owner, episode.attempt) == (name, 1)
            assert taken.setdefault(episode.episode_id, name) == name

    assert await claims["a"].num_unowned(whose) == 30
    while await claims["a"].num_unowned(whose):
        await asyncio.gather(*(claim(name) for name in claims))
    assert len(taken) == 30
    assert set(taken.values()) == {"a", "b", "c"}
    store = EpisodeStore(engine, "a")
    assert {(await store.get(episode_id)).owner for episode_id, name in taken.items() if name == "b"} == {"b"}


async def test_episodes_when_their_replica_is_gone_are_taken_over_and_its_late_end_is_refused(
    engine: AsyncEngine,
) -> None:
    of_a = await with_group(engine)
    await join(engine, "b")
    claims, of_b = ClaimStore(engine, "b"), EpisodeStore(engine, "b")
    assert await claims.claim(OF_RUN, 9, NOW) == []
    replicas = ReplicaStore(engine)
    assert not await replicas.remove(beat_of("a", 5), as_heard=True), "it was heard of since"
    gone = await asyncio.gather(*(replicas.remove(beat_of("a"), as_heard=True) for _ in range(2)))
    assert sorted(gone) == [False, True]
    assert await ClaimStore(engine, "a").lost(["ep_0", "ep_1"]) == ["ep_0", "ep_1"]
    [first] = await claims.claim(OF_RUN, 1, NOW)
    assert (first.episode_id, first.attempt) == ("ep_0", 2)
    assert not await of_a.end(ending(0), NOW)
    assert await of_a.next_attempt("ep_0", 1, NOW) is None
    # Nobody claimed the other one yet: what its first player made of it is as good as any.
    assert await of_a.end(ending(1), NOW)
    assert await claims.claim(OF_RUN, 9, NOW) == []
    assert await of_b.end(ending(0, attempt=2, trajectory_id="ep_0-2"), NOW)
    assert ((await of_b.get("ep_0")).owner, (await of_b.get("ep_1")).owner) == ("b", "a")


async def test_replica_when_it_comes_back_finds_what_it_left_free(engine: AsyncEngine) -> None:
    await with_group(engine)
    assert await join(engine, "b") == [False]
    claims = ClaimStore(engine, "b")
    again = replace(beat_of("a"), life="another life")
    assert not await ReplicaStore(engine).join(again, NOW)
    assert [episode.attempt for episode in await claims.claim(OF_RUN, 9, NOW)] == [2, 2]
    heard = await ReplicaStore(engine).beat(replace(beat_of("a"), num_beats=7))
    assert heard == [again, beat_of("b")], "the earlier life beats no more"
    await claims.give_back(["ep_0"])
    await ClaimStore(engine, "a").give_back(["ep_1"])
    assert [episode.episode_id for episode in await claims.claim(OF_RUN, 9, NOW)] == ["ep_0"]


async def test_check_when_claimed_is_one_replicas_until_it_is_gone(engine: AsyncEngine) -> None:
    store = await with_tasks(engine, make_task(state=TaskState.ADMITTING))
    await join(engine, "a", "b")
    claimed = await asyncio.gather(*(store.claim_check("task_one", name) for name in "ab"))
    [owner] = [name for name, task in zip("ab", claimed, strict=True) if task is not None]
    other = "b" if owner == "a" else "a"
    assert await store.admitting_ids(owner) == ["task_one"]
    assert await store.admitting_ids(other) == []
    assert await store.claim_check("task_one", owner) is not None
    await ReplicaStore(engine).remove(beat_of(owner), as_heard=False)
    assert await store.claim_check("task_one", other) is not None
    await store.set_verdict("task_one", admitted=True, reasons=[])
    assert await store.claim_check("task_one", other) is None


async def test_end_when_the_attempt_was_superseded_changes_nothing(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    assert await store.next_attempt("ep_0", 1, NOW) == 2
    assert await store.next_attempt("ep_0", 1, NOW) is None
    assert not await store.end(ending(0), NOW)
    assert await store.trajectory("ep_0", 1) is None
    assert await store.end(ending(0, attempt=2, trajectory_id="ep_0-2"), NOW)
    assert not await store.end(ending(0, attempt=2, trajectory_id="ep_0-2"), NOW)


async def test_end_when_the_error_holds_odd_characters_is_stored(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    assert await store.end(ending(0, state=EpisodeState.INFRA_FAILED, error="a\x00b\udc80"), NOW)
    assert (await store.get("ep_0")).error == "a\ufffdb?"


async def test_grades_when_delivered_twice_or_late_count_once(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    await store.end(ending(0), NOW)
    await store.end(ending(1), NOW)
    assert await store.record_grades([note(0, attempt=2), note(9)], NOW) == 0
    assert await store.record_grades([note(0), note(0, reward=0.0), note(1, reward=None)], NOW) == 2
    graded, failed = await store.get("ep_0"), await store.get("ep_1")
    assert (graded.state, graded.reward, graded.grade) == (EpisodeState.GRADED, 1.0, b"g")
    assert (failed.state, failed.reward) == (EpisodeState.INFRA_FAILED, None)
    assert (graded.error, failed.error) == ("", "no sandbox\ufffd")
    assert [episode.episode_id for episode in await store.ended_since("run_1", 0)] == ["ep_0", "ep_1"]
    assert await store.ended_since("run_1", 1) == []


async def test_cancel_when_the_episode_is_open_owes_its_group_an_end(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    await store.end(ending(1), NOW)
    for number in (0, 1):
        assert (await store.cancel(f"ep_{number}", NOW)).state is EpisodeState.CANCELLED
    # The one in grading reaches its group through its grade.
    overdue = await store.overdue(before=NOW + timedelta(seconds=1), limit=9)
    assert [episode.episode_id for episode in overdue] == ["ep_0"]
    await store.mark_sent(["ep_0"])
    assert await store.overdue(before=NOW + timedelta(seconds=1), limit=9) == []
    with pytest.raises(Conflict):
        await store.cancel("ep_0", NOW)
    with pytest.raises(NotFound):
        await store.cancel("ep_none", NOW)
    assert not await store.end(ending(0), NOW)
    assert await store.record_grades([note(1)], NOW) == 0


async def test_cancel_run_when_episodes_are_open_ends_them_owing_nothing(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    await store.end(ending(0), NOW)
    await store.record_grades([note(0)], NOW)
    assert await store.cancel_run("run_1", NOW) == ["ep_1"]
    assert await store.overdue(before=NOW + timedelta(seconds=1), limit=9) == []
    assert (await store.get("ep_0")).state is EpisodeState.GRADED


async def test_overdue_when_claimed_is_settled_by_one_and_counts_from_then(engine: AsyncEngine) -> None:
    store = await with_group(engine)
    await store.end(ending(0), NOW)
    await store.end(ending(1, state=EpisodeState.INFRA_FAILED, is_owed=True), NOW)
    assert await store.overdue(before=NOW, limit=9) == []
    later = NOW + timedelta(seconds=60)
    assert len(await store.overdue(before=later, limit=9)) == 2
    assert len(await store.overdue(before=later, limit=1)) == 1
    stores = [store, EpisodeStore(engine, "b")]
    settled = await asyncio.gather(
        *(each.claim_overdue(["ep_0"], before=later, now=later) for each in stores)
    )
    assert sorted(settled) == [[], ["ep_0"]]
    assert [episode.episode_id for episode in await store.overdue(before=later, limit=9)] == ["ep_1"]
    assert await store.claim_overdue([], before=later, now=later) == []


async def test_evaluation_when_every_episode_has_ended_completes_once(engine: AsyncEngine) -> None:
    await with_tasks(engine)
    store, episodes = EvaluationStore(engine), EpisodeStore(engine, "a")
    evaluation = EVALUATION
    members = [member(number, run_id="", evaluation_id="eval_1") for number in range(3)]
    assert await store.create(evaluation, members, creation("k", response="first")) == "first"
    again = replace(evaluation, evaluation_id="eval_2")
    assert await store.create(again, [], creation("k", response="second")) == "first"
    assert await store.running() == [evaluation]
    await join(engine, "a")
    assert len(await ClaimStore(engine, "a").claim(Whose(evaluation_id="eval_1"), 9, NOW)) == 3
    await episodes.end(ending(0), NOW)
    await episodes.end(ending(1, num_turns=5), NOW)
    await episodes.end(ending(2, state=EpisodeState.INFRA_FAILED, num_turns=0, num_sampled_tokens=0), NOW)
    await episodes.record_grades([note(0)], NOW)
    assert not await store.complete_if_done("eval_1", NOW)
    await episodes.record_grades([note(1, reward=0.5)], NOW)
    await store.set_weight_version("eval_1", 4)
    await store.set_weight_version("eval_1", 5)
    await store.add_usage("eval_1", busy_s=4.0, available_s=10.0)
    await store.add_usage("eval_1", busy_s=2.0, available_s=12.0)
    assert await store.complete_if_done("eval_1", NOW)
    assert await store.complete_if_done("eval_1", NOW + timedelta(seconds=9))
    stored = await store.get("eval_1")
    assert (stored.state, stored.weight_version) == (EvaluationState.COMPLETED, 4)
    assert (stored.engine_utilisation, stored.finished_at) == (0.5, NOW)
    tally = await store.tally("eval_1")
    assert (tally.num_episodes, tally.num_done, tally.num_graded, tally.num_passed) == (3, 3, 2, 1)
    assert (tally.num_infra_failed, tally.mean_turns, tally.tokens_generated) == (1, 4.0, 60)
    assert await store.running() == []


async def test_demonstrations_when_stored_give_their_scripts_back(engine: AsyncEngine) -> None:
    await with_tasks(engine)
    store, episodes = DemonstrationStore(engine), EpisodeStore(engine, "a")
    demonstration = DemonstrationSet(
        demonstration_id="demo_1",
        run_id="run_1",
        state=DemonstrationState.RUNNING,
        created_at=NOW,
        finished_at=None,
    )
    scripts = [
        (ScriptedTurn(text="", tool_calls=(("read_file", {"path": "a\x00é"}),)),),
        (ScriptedTurn(text="done", tool_calls=()),),
    ]
    members = [
        member(number, group_id=f"ep_{number}", group_size=1, demonstration_id="demo_1")
        for number in range(2)
    ]
    await store.create(demonstration, scripts, members, creation())
    assert await store.scripts("demo_1") == scripts
    assert await store.running() == [demonstration]
    await join(engine, "a")
    claims = ClaimStore(engine, "a")
    assert await claims.claim(OF_RUN, 9, NOW) == [], "scripted episodes are no group of the run"
    claimed = await claims.claim(Whose(demonstration_id="demo_1"), 9, NOW)
    assert [(episode.position, episode.attempt) for episode in claimed] == [(0, 1), (1, 1)]
    assert await episodes.runs_with_unplayed() == []
    await episodes.end(ending(0, state=EpisodeState.RECORDED, is_owed=True), NOW)
    assert not await store.complete_if_done("demo_1", NOW)
    await episodes.end(ending(1, state=EpisodeState.INFRA_FAILED, is_owed=True), NOW)
    assert await store.complete_if_done("demo_1", NOW)
    assert await store.counts("demo_1") == {EpisodeState.RECORDED: 1, EpisodeState.INFRA_FAILED: 1}


async def test_demonstrations_when_their_tasks_have_no_verdict_are_not_claimed(engine: AsyncEngine) -> None:
    suites = await with_tasks(engine, make_task(state=TaskState.ADMITTING))
    demonstration = DemonstrationSet(
        demonstration_id="demo_1",
        run_id="run_1",
        state=DemonstrationState.RUNNING,
        created_at=NOW,
        finished_at=None,
    )
    script = (ScriptedTurn(text="done", tool_calls=()),)
    await DemonstrationStore(engine).create(
        demonstration, [script], [member(0, demonstration_id="demo_1")], creation()
    )
    claims, whose = ClaimStore(engine, "a"), Whose(demonstration_id="demo_1")
    assert await claims.claim(whose, 9, NOW) == []
    await suites.set_verdict("task_one", admitted=False, reasons=[])
    assert len(await claims.claim(whose, 9, NOW)) == 1


WEIGHTS = Serving(run_id="run_1", weight_version=3, path="/v3", manifest_sha256="m")


async def test_lease_when_two_ask_at_once_is_one_replicas_until_it_is_given_back_or_gone(
    engine: AsyncEngine,
) -> None:
    await join(engine, "a", "b")
    stores = {name: WeightStore(engine) for name in "ab"}
    fences = await asyncio.gather(*(store.take_lease(name) for name, store in stores.items()))
    [(holder, fence)] = [(name, found) for name, found in zip("ab", fences, strict=True) if found is not None]
    other = "b" if holder == "a" else "a"
    store = stores[holder]
    assert (await store.look()).holder == holder
    assert await store.take_lease(other) is None
    label = await store.begin_load(fence, "http://e", WEIGHTS)

    await ReplicaStore(engine).remove(beat_of(holder), as_heard=False)
    with pytest.raises(LeaseLost):
        await store.conclude(fence, label, LoadState.PROVEN)
    newer = await store.take_lease(other)
    assert newer is not None
    assert newer > fence
    for late in (
        store.begin_load(fence, "http://e", WEIGHTS),
        store.conclude(fence, label, LoadState.PROVEN),
        store.serve(fence, WEIGHTS, is_proven=True),
    ):
        with pytest.raises(LeaseLost):
            await late
    found = await store.find(label)
    assert found is not None
    assert found.state is LoadState.PENDING
    await store.give_lease_back(fence)
    assert (await store.look()).holder == other
    await store.give_lease_back(newer)
    assert (await store.look()).holder == ""


async def test_lease_when_its_holder_starts_again_is_its_own(engine: AsyncEngine) -> None:
    await join(engine, "a", "b")
    store = WeightStore(engine)
    first = await store.take_lease("a")
    again = await store.take_lease("a")
    assert (first, again) == (1, 2)


async def test_loads_when_settled_say_what_their_labels_are_worth(engine: AsyncEngine) -> None:
    store = WeightStore(engine)
    fence = await store.take_lease("a")
    assert fence is not None
    labels = [await store.begin_load(fence, f"http://e{i}", WEIGHTS) for i in (0, 1, 0)]
    assert labels == ["3.1", "3.2", "3.3"]
    assert (await store.look()).pending_urls == {"http://e0", "http://e1"}
    begun = await store.find("3.1")
    assert begun is not None
    assert begun.state is LoadState.FAILED
    await store.conclude(fence, "3.2", LoadState.REFUSED)
    assert await store.is_refused("run_1", 3)
    await store.conclude(fence, "3.3", LoadState.PROVEN)
    assert not await store.is_refused("run_1", 3)
    assert (await store.look()).pending_urls == frozenset()
    assert await store.find("3.3") == Load(
        label="3.3", engine_url="http://e0", weights=WEIGHTS, state=LoadState.PROVEN
    )
    assert await store.find("3") is None
    unproven = await store.begin_load(fence, "http://e0", WEIGHTS)
    await store.conclude(fence, unproven, LoadState.REFUSED)
    taken_back = await store.find("3.3")
    assert taken_back is not None
    assert taken_back.state is LoadState.REFUSED
    assert await store.is_refused("run_1", 3)


async def test_serving_when_replaced_is_the_last(engine: AsyncEngine) -> None:
    store = WeightStore(engine)
    view = await store.look()
    assert (view.serving, view.is_proven, view.holder) == (None, False, "")
    for version in (1, 2):
        fence = await store.take_lease("a")
        assert fence is not None
        await store.serve(fence, replace(WEIGHTS, weight_version=version), is_proven=version == 2)
    view = await store.look()
    assert (view.serving, view.is_proven, view.fence) == (replace(WEIGHTS, weight_version=2), True, 2)
