"""Admission: no task holds up another, none waits for ever, and a stop waits for none."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from practicum.db.engine import create_engine
from practicum.db.migrate import upgrade
from practicum.errors import GraderError, InvalidInput, Overloaded, Unauthorized
from practicum.rpc.client import connect
from practicum.rpc.codes import RpcUnavailable
from practicum.rpc.server import start_server
from practicum.v1 import reward_pb2
from practicum.v1.reward_pb2_grpc import GradingServiceServicer, add_GradingServiceServicer_to_server
from services.rollout.main import MIGRATIONS
from services.rollout.metrics import Metrics
from services.rollout.rpc.sandboxes import Admissions, Verdict
from services.rollout.scheduler.admission import CHARGED_WAITS_S, MAX_TRIES, Admitter
from services.rollout.store.suites import Creation, Suite, SuiteStore
from services.rollout.tasks import Split, Task, TaskState
from tests.fixtures.rollout import ManualClock, until

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GOOD = Verdict(admitted=True, reasons=())


class ScriptedAdmissions(Admissions):
    """Admits every task, but those in `on` fail and those in `hanging` get no answer, by name."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.on: dict[str, Exception] = {}
        self.hanging: set[str] = set()

    async def admit(self, task: Task) -> Verdict:
        self.asked.append(task.name)
        if task.name in self.hanging:
            await asyncio.Event().wait()
        if task.name in self.on:
            raise self.on[task.name]
        return GOOD


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SuiteStore]:
    url = f"sqlite:///{tmp_path}/rollout.sqlite"
    await asyncio.to_thread(upgrade, url, MIGRATIONS)
    engine = create_engine(url)
    store = SuiteStore(engine)
    members = [
        Task(
            task_id=f"task_{number}",
            suite_id="suite_1",
            position=number,
            name=f"t{number}",
            split=Split.TRAIN,
            instruction="Fix it.",
            tools=(),
            tags=(),
            session_wall_s=0.0,
            spec=b"",
            reference=None,
            state=TaskState.ADMITTING,
        )
        for number in range(6)
    ]
    suite = Suite(suite_id="suite_1", name="bugs", version="1", body_digest="d", created_at=NOW)
    await store.add_suite(suite, members, Creation(key=None, body_digest="d", response_json="{}", now=NOW))
    yield store
    await engine.dispose()


def admitter_of(store: SuiteStore, admissions: Admissions, clock: ManualClock, at_once: int = 2) -> Admitter:
    return Admitter(
        store=store,
        admissions=admissions,
        metrics=Metrics(CollectorRegistry()),
        clock=clock,
        instance="rollout-1",
        num_at_once=at_once,
    )


async def test_admission_when_the_oldest_tasks_fail_gives_those_behind_them_their_verdict(
    store: SuiteStore,
) -> None:
    admissions, stop = ScriptedAdmissions(), asyncio.Event()
    admissions.on = {name: GraderError("no clean room") for name in ("t0", "t1", "t2")}
    admissions.on["t3"] = KeyError("a fault of ours")
    assert await admitter_of(store, admissions, ManualClock()).round(stop)
    assert await store.admitting_ids("rollout-1") == ["task_0", "task_1", "task_2", "task_3"]
    assert await store.admitted_ids("suite_1", Split.TRAIN) == ["task_4", "task_5"]


async def test_admission_when_a_task_fails_every_try_rejects_it_with_the_error(store: SuiteStore) -> None:
    admissions, clock, stop = ScriptedAdmissions(), ManualClock(), asyncio.Event()
    admissions.on = {"t0": GraderError("no clean room")}
    admitter = admitter_of(store, admissions, clock)
    for tries, wait_s in enumerate(CHARGED_WAITS_S, start=1):
        await admitter.round(stop)
        clock.now_s += wait_s - 0.1
        await admitter.round(stop)
        assert admissions.asked.count("t0") == tries, "not due yet"
        clock.now_s += 0.1
    assert await store.admitting_ids("rollout-1") == ["task_0"]
    await admitter.round(stop)
    task = await store.get_task("task_0")
    assert task.state is TaskState.REJECTED
    assert admissions.asked.count("t0") == MAX_TRIES
    assert task.reasons == (
        {
            "name": "platform",
            "ok": False,
            "detail": f"no verdict after {MAX_TRIES} tries; the last failed with grader: no clean room",
        },
    )


@pytest.mark.parametrize("error", [RpcUnavailable("gone"), Overloaded("full"), Unauthorized("who?")])
async def test_admission_when_the_service_is_away_charges_nobody(store: SuiteStore, error: Exception) -> None:
    admissions, clock, stop = ScriptedAdmissions(), ManualClock(), asyncio.Event()
    admissions.on = {f"t{number}": error for number in range(6)}
    admitter = admitter_of(store, admissions, clock)
    for _ in range(10 * MAX_TRIES):
        assert not await admitter.round(stop)
        clock.now_s += 60
    assert len(await store.admitting_ids("rollout-1")) == 6
    assert min(admissions.asked.count(f"t{number}") for number in range(6)) > MAX_TRIES
    admissions.on = {}
    assert await admitter.round(stop)
    assert await store.admitting_ids("rollout-1") == []


async def test_admission_when_one_task_takes_the_service_down_comes_to_the_others_first(
    store: SuiteStore,
) -> None:
    admissions, clock, stop = ScriptedAdmissions(), ManualClock(), asyncio.Event()
    admissions.on = {"t0": RpcUnavailable("connection reset")}
    admitter = admitter_of(store, admissions, clock, at_once=1)
    assert not await admitter.round(stop)
    clock.now_s += 2
    await admitter.round(stop)
    assert admissions.asked == ["t0", "t1", "t2", "t3", "t4", "t5", "t0"]
    assert await store.admitting_ids("rollout-1") == ["task_0"]


async def test_admission_when_a_task_hangs_leaves_the_other_slots_to_the_others(store: SuiteStore) -> None:
    admissions, stop = ScriptedAdmissions(), asyncio.Event()
    admissions.hanging = {"t0"}
    async with asyncio.TaskGroup() as group:
        working = group.create_task(admitter_of(store, admissions, ManualClock()).round(stop))

        async def only_the_hanging_one_waits() -> bool:
            return await store.admitting_ids("rollout-1") == ["task_0"]

        await until(only_the_hanging_one_waits)
        stop.set()
        assert await working


async def test_admission_when_stopped_drops_what_is_in_flight_and_asks_for_no_more(store: SuiteStore) -> None:
    admissions, stop = ScriptedAdmissions(), asyncio.Event()
    admissions.hanging = {"t0", "t1"}
    async with asyncio.TaskGroup() as group:
        working = group.create_task(admitter_of(store, admissions, ManualClock()).run(stop))
        await until(lambda: len(admissions.asked) == 2)
        started_s = time.monotonic()
        stop.set()
        await working
    assert time.monotonic() - started_s < 5, "the drain takes 20 s"
    assert admissions.asked == ["t0", "t1"]
    assert len(await store.admitting_ids("rollout-1")) == 6, "a dropped check is no verdict"


async def test_admission_when_the_task_is_refused_as_input_rejects_it_at_once(store: SuiteStore) -> None:
    admissions, stop = ScriptedAdmissions(), asyncio.Event()
    admissions.on = {"t2": InvalidInput("grader.files", "no test in it")}
    await admitter_of(store, admissions, ManualClock()).round(stop)
    assert await store.admitting_ids("rollout-1") == []
    assert (await store.get_task("task_2")).reasons == (
        {"name": "grader.files", "ok": False, "detail": "no test in it"},
    )


class SlowGrading(GradingServiceServicer):
    """Gives no verdict within any deadline of these tests."""

    async def Admit(self, request: reward_pb2.AdmitRequest, context: object) -> reward_pb2.AdmitResponse:
        await asyncio.sleep(60)
        return reward_pb2.AdmitResponse()


async def test_admissions_when_a_task_gets_no_answer_in_time_blame_the_task_and_when_away_nobody(
    store: SuiteStore,
) -> None:
    def register(server: grpc.aio.Server) -> None:
        add_GradingServiceServicer_to_server(SlowGrading(), server)

    server = await start_server([register], service_names=[], address="127.0.0.1:0", token="t")
    channel = connect(f"127.0.0.1:{server.port}", token="t")
    task = await store.get_task("task_0")
    spec = reward_pb2.TaskSpec(grader=reward_pb2.Grader(timeout_s=0.05)).SerializeToString()
    admissions = Admissions(channel, deadline_s=0.1)
    try:
        with pytest.raises(GraderError, match=r"no verdict within 0.3 s"):  # four gradings of 0.05 s on top
            await admissions.admit(replace(task, spec=spec))
    finally:
        await server.stop(0)
    with pytest.raises(RpcUnavailable):
        await Admissions(channel).admit(task)
    await channel.close()
