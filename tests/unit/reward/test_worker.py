"""The grading worker on a queue in memory: what it publishes, and that a redelivery changes nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from practicum.clock import SystemClock
from practicum.db.engine import create_engine
from practicum.db.migrate import upgrade
from practicum.errors import QueueError
from practicum.queue.base import Entry
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import EVENTS, GRADING, trajectories
from practicum.trajectory import Outcome, Trajectory
from practicum.v1 import events_pb2, reward_pb2, trajectory_pb2
from practicum.wire import trajectory_from_pb
from services.reward.graders.base import GraderSpec, Task, Verdict
from services.reward.graders.tests import TestsGrader
from services.reward.grading import Grading
from services.reward.metrics import RewardMetrics
from services.reward.sandbox.base import Changes
from services.reward.store import MIGRATIONS
from services.reward.store.grades import GradeStore
from services.reward.worker.consumer import GROUP, GradingWorker
from tests.fixtures.reward import FIXED, LIMITS, changed, grade_request, make_task, make_trajectory


class CountingGrader:
    """Grades with the real grader and counts."""

    def __init__(self, grader: TestsGrader) -> None:
        self._grader = grader
        self.num_graded = 0
        self.going_on = asyncio.Event()  # grading waits for it
        self.going_on.set()

    def check(self, spec: GraderSpec) -> None:
        self._grader.check(spec)

    async def grade(self, grading_id: str, task: Task, changes: Changes) -> Verdict:
        self.num_graded += 1
        await self.going_on.wait()
        return await self._grader.grade(grading_id, task, changes)


class ImpatientClock(SystemClock):
    """Does not wait, and can be put ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Rig:
    """A worker with everything around it."""

    def __init__(self, grader: TestsGrader, store: GradeStore, queue: MemoryQueue) -> None:
        self.queue = queue
        self.grader = CountingGrader(grader)
        self.store = store
        self.worker = GradingWorker(
            queue=self.queue,
            grading=Grading(
                graders={"tests": self.grader},
                metrics=RewardMetrics(CollectorRegistry()),
                clock=SystemClock(),
            ),
            store=store,
            clock=ImpatientClock(),
            defaults=LIMITS,
            consumer="reward-0",
            concurrency=4,
        )

    async def read(self, stream: str, num_entries: int) -> list[Entry]:
        entries: list[Entry] = []
        async with asyncio.timeout(20):
            while len(entries) < num_entries:
                found = await self.queue.read(stream, "test", "test", max_entries=10, wait_s=1)
                await self.queue.ack(stream, "test", [entry.entry_id for entry in found])
                entries += found
        return entries

    async def graded(self, num_entries: int, run_id: str = "run_1") -> list[Trajectory]:
        entries = await self.read(trajectories(run_id), num_entries)
        return [trajectory_from_pb(entry.unpack(trajectory_pb2.Trajectory)) for entry in entries]

    async def run(self) -> None:
        stop = asyncio.Event()
        working = asyncio.create_task(self.worker.run(stop))
        async with asyncio.timeout(20):
            while (depth := await self.queue.depth(GRADING, GROUP)).undelivered or depth.pending:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        stop.set()
        await working


class LateQueue(MemoryQueue):
    """A queue that cannot be reached at first."""

    num_refusals = 3

    async def ensure_group(self, stream: str, group: str) -> None:
        if stream == GRADING and self.num_refusals:
            self.num_refusals -= 1
            raise QueueError("Redis: connection refused")
        await super().ensure_group(stream, group)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[GradeStore]:
    url = f"sqlite:///{tmp_path}/reward.sqlite"
    await asyncio.to_thread(upgrade, url, MIGRATIONS)
    engine = create_engine(url)
    yield GradeStore(engine)
    await engine.dispose()


@pytest.fixture
async def rig(grader: TestsGrader, store: GradeStore) -> Rig:
    return Rig(grader, store, MemoryQueue(claim_after_s=1.5, max_deliveries=2))


async def test_graded_trajectories_reach_the_trainer_and_the_events(rig: Rig) -> None:
    await rig.queue.publish(GRADING, grade_request(make_trajectory("ep_1-1"), changed({"calc.py": FIXED})))
    await rig.queue.publish(GRADING, grade_request(make_trajectory("ep_2-1"), Changes()))
    await rig.run()
    graded = {one.trajectory_id: one for one in await rig.graded(2)}
    assert {name: one.reward for name, one in graded.items()} == {"ep_1-1": 1.0, "ep_2-1": 0.0}
    for one in graded.values():
        one.check()
        assert one.outcome is Outcome.COMPLETED
    events = [entry.unpack(events_pb2.TrajectoryGraded) for entry in await rig.read(EVENTS, 2)]
    assert {event.trajectory_id: event.grade.reward for event in events} == {"ep_1-1": 1.0, "ep_2-1": 0.0}
    assert (await rig.store.get("ep_1-1")).grade == graded["ep_1-1"].grade


async def test_a_grading_longer_than_the_claim_time_is_nobody_elses(rig: Rig) -> None:
    worker = replace(rig.worker, renew_every_s=0.3)
    rig.grader.going_on.clear()
    await rig.queue.publish(GRADING, grade_request(make_trajectory("ep_1-1"), changed({"calc.py": FIXED})))
    stop = asyncio.Event()
    working = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(20):
        while rig.grader.num_graded == 0:  # noqa: ASYNC110 — a counter gives no event
            await asyncio.sleep(0.01)
    assert await rig.queue.read(GRADING, GROUP, "reward-1", max_entries=1, wait_s=2.5) == []
    rig.grader.going_on.set()
    assert [one.reward for one in await rig.graded(1)] == [1.0]
    stop.set()
    await working
    assert rig.grader.num_graded == 1


async def test_a_redelivery_publishes_the_stored_grade_and_grades_nothing(rig: Rig) -> None:
    request = grade_request(make_trajectory("ep_1-1"), changed({"calc.py": FIXED}))
    for _ in range(3):
        await rig.queue.publish(GRADING, request)
        await rig.run()
    assert rig.grader.num_graded == 1
    assert [one.reward for one in await rig.graded(3)] == [1.0, 1.0, 1.0]


async def test_an_evaluation_is_not_trained_on(rig: Rig) -> None:
    await rig.queue.publish(GRADING, grade_request(make_trajectory("ep_1-1", run_id=""), Changes()))
    await rig.run()
    event = (await rig.read(EVENTS, 1))[0]
    assert event.unpack(events_pb2.TrajectoryGraded).grade.reward == 0.0
    assert (await rig.queue.depth(trajectories(""), "test")).undelivered == 0


async def test_a_task_nobody_can_grade_has_no_reward_and_closes_its_group(rig: Rig) -> None:
    request = grade_request(make_trajectory("ep_1-1"), Changes())
    request.task.grader.kind = "oracle"
    await rig.queue.publish(GRADING, request)
    await rig.run()
    graded = (await rig.graded(1))[0]
    assert (graded.reward, graded.outcome) == (None, Outcome.INFRA_FAILED)
    assert "oracle" in graded.error
    graded.check()


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [({"data.txt": "x"}, "no test file"), ({"test_b.py": "def test_a(:\n"}, "test_b.py: correct its syntax")],
)
async def test_hidden_tests_that_cannot_run_close_the_entry_with_evidence(
    rig: Rig, hidden: dict[str, str], reason: str
) -> None:
    request = grade_request(make_trajectory("ep_1-1"), Changes(), make_task(hidden=hidden))
    await rig.queue.publish(GRADING, request)
    await rig.run()
    graded = (await rig.graded(1))[0]
    assert (graded.reward, graded.outcome) == (None, Outcome.INFRA_FAILED)
    assert graded.grade is not None
    assert any(reason in line for line in graded.grade.evidence)
    assert rig.grader.num_graded == 0
    assert await rig.queue.dead_letters(GRADING, GROUP) == []


async def test_a_queue_that_is_away_at_the_start_is_waited_for(
    grader: TestsGrader, store: GradeStore
) -> None:
    queue = LateQueue()
    rig = Rig(grader, store, queue)
    await queue.publish(GRADING, grade_request(make_trajectory("ep_1-1"), changed({"calc.py": FIXED})))
    stop = asyncio.Event()
    working = asyncio.create_task(rig.worker.run(stop))
    assert [one.reward for one in await rig.graded(1)] == [1.0]
    stop.set()
    await working
    assert queue.num_refusals == 0


async def test_a_restart_takes_up_at_once_what_its_name_owes(grader: TestsGrader, store: GradeStore) -> None:
    queue = MemoryQueue(claim_after_s=3600)
    rig = Rig(grader, store, queue)
    names = [f"ep_{number}-1" for number in range(6)]  # more than are graded at a time
    for name in names:
        await queue.publish(GRADING, grade_request(make_trajectory(name), changed({"calc.py": FIXED})))
    lost = await queue.read(GRADING, GROUP, rig.worker.consumer, max_entries=5, wait_s=1)
    assert len(lost) == 5  # the process ends here, with these in hand
    await rig.run()
    assert sorted(one.trajectory_id for one in await rig.graded(6)) == names
    assert rig.grader.num_graded == 6


async def test_a_grading_longer_than_the_claim_time_is_not_begun_again(
    grader: TestsGrader, store: GradeStore
) -> None:
    clock = ImpatientClock()
    queue = MemoryQueue(clock=clock, claim_after_s=60)
    rig = Rig(grader, store, queue)
    rig.grader.going_on.clear()
    await queue.publish(GRADING, grade_request(make_trajectory("ep_1-1"), changed({"calc.py": FIXED})))
    stop = asyncio.Event()
    working = asyncio.create_task(rig.worker.run(stop))
    async with asyncio.timeout(20):
        while rig.grader.num_graded == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        clock.ahead_s = 61  # the entry in hand counts as stale now, and comes with the next
        await queue.publish(GRADING, grade_request(make_trajectory("ep_2-1"), changed({"calc.py": FIXED})))
        while rig.grader.num_graded == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    rig.grader.going_on.set()
    graded = await rig.graded(2)
    stop.set()
    await working
    assert sorted(one.trajectory_id for one in graded) == ["ep_1-1", "ep_2-1"]
    assert rig.grader.num_graded == 2


async def test_an_unreadable_entry_goes_to_the_dead_letters_and_stops_nobody(rig: Rig) -> None:
    await rig.queue.publish(GRADING, events_pb2.RunChanged(run_id="run_1"))
    await rig.queue.publish(GRADING, grade_request(make_trajectory("ep_1-1"), Changes()))
    await rig.run()
    # at least once: a slow machine may see it twice
    assert {one.trajectory_id for one in await rig.graded(1)} == {"ep_1-1"}
    assert len(await rig.queue.dead_letters(GRADING, GROUP)) == 1


async def test_a_policy_that_hangs_does_not_hold_up_the_others(rig: Rig) -> None:
    task = make_task(timeout_s=1.0)
    hang = changed({"calc.py": "def add(a, b):\n    while True: pass\n"})
    requests: list[reward_pb2.GradeRequest] = [grade_request(make_trajectory("ep_0-1"), hang, task)]
    requests += [
        grade_request(make_trajectory(f"ep_{n}-1"), changed({"calc.py": FIXED})) for n in range(1, 5)
    ]
    for request in requests:
        await rig.queue.publish(GRADING, request)
    await rig.run()
    order = [one.trajectory_id for one in await rig.graded(5)]
    assert order.index("ep_0-1") == 4


async def test_a_stop_that_cuts_gradings_gives_them_and_the_unbegun_to_another_at_once(
    grader: TestsGrader, store: GradeStore
) -> None:
    queue = MemoryQueue(claim_after_s=3600)
    await queue.ensure_group(GRADING, GROUP)
    for number in range(6):
        request = grade_request(make_trajectory(f"ep_{number}-1"), changed({"calc.py": FIXED}))
        await queue.publish(GRADING, request)
    # An earlier life read all of them: four are begun again, two wait.
    assert len(await queue.read(GRADING, GROUP, "reward-0", max_entries=9, wait_s=1)) == 6
    first, stop = Rig(grader, store, queue), asyncio.Event()
    first.grader.going_on.clear()
    working = asyncio.create_task(first.worker.run(stop))
    async with asyncio.timeout(20):
        while first.grader.num_graded < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stop.set()
    working.cancel()
    await asyncio.wait([working])
    entries = await queue.read(GRADING, GROUP, "reward-1", max_entries=9, wait_s=5)
    assert len(entries) == 6
    assert (await queue.depth(GRADING, GROUP)).pending == 6


async def test_a_stop_lets_gradings_in_hand_finish(grader: TestsGrader, store: GradeStore) -> None:
    queue = MemoryQueue(claim_after_s=3600)
    await queue.publish(GRADING, grade_request(make_trajectory("ep_1-1"), changed({"calc.py": FIXED})))
    rig, stop = Rig(grader, store, queue), asyncio.Event()
    rig.grader.going_on.clear()
    working = asyncio.create_task(rig.worker.run(stop))
    async with asyncio.timeout(20):
        while not rig.grader.num_graded:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stop.set()
        await queue.publish(GRADING, grade_request(make_trajectory("ep_2-1"), Changes()))
        rig.grader.going_on.set()
        await working
    assert [one.trajectory_id for one in await rig.graded(1)] == ["ep_1-1"]
    assert rig.grader.num_graded == 1, "what came after the stop was not begun"


async def test_entries_when_their_replica_died_are_graded_by_another_and_each_once(
    rig: Rig, grader: TestsGrader, store: GradeStore
) -> None:
    other = Rig(grader, store, rig.queue)
    other.worker = replace(other.worker, consumer="reward-1")
    for number in range(6):
        await rig.queue.publish(
            GRADING, grade_request(make_trajectory(f"ep_{number}-1"), changed({"calc.py": FIXED}))
        )
    await rig.queue.ensure_group(GRADING, GROUP)
    left = await rig.queue.read(GRADING, GROUP, "reward-dead", max_entries=2, wait_s=1)
    assert len(left) == 2
    await asyncio.gather(rig.run(), other.run())
    graded = await rig.graded(6)
    assert sorted(one.trajectory_id for one in graded) == [f"ep_{number}-1" for number in range(6)]
    assert rig.grader.num_graded + other.grader.num_graded == 6
    assert min(rig.grader.num_graded, other.grader.num_graded) > 0
