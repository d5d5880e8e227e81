"""Routing, slots, health and the measure of business."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from practicum.clock import SystemClock
from practicum.errors import EngineError
from practicum.trajectory import SamplingParams
from services.rollout.engine.health import HealthGate
from services.rollout.engine.labels import LabelBook
from services.rollout.engine.meter import SlotMeter
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.records import Load, LoadState, Serving
from tests.fixtures.chat_models import build_chat
from tests.fixtures.rollout import ManualClock, until
from tests.fixtures.scripted_engine import ScriptedEngine, make_engine

PROMPT = np.array([5, 6, 7], dtype=np.int32)


BASE = Serving(run_id="", weight_version=0, label="default", path="/models/base")


class Loads:
    """Loads on record, as a test sets them."""

    def __init__(self) -> None:
        self.states: dict[str, LoadState] = {}
        self.num_asked = 0

    async def find(self, label: str) -> Load | None:
        self.num_asked += 1
        if label not in self.states:
            return None
        weights = Serving(run_id="run_1", weight_version=1, path="/models/v1")
        return Load(label=label, engine_url="http://engine-0", weights=weights, state=self.states[label])


@asynccontextmanager
async def pool_of(
    *engines: ScriptedEngine, num_slots: int = 2, wait_s: float = 0.2, loads: "Loads | None" = None
) -> AsyncIterator[EnginePool]:
    loads = loads or Loads()
    clock, chat = SystemClock(), build_chat()
    clients = [httpx.AsyncClient(transport=httpx.MockTransport(engine)) for engine in engines]
    made = [
        make_engine(client, index, chat, num_slots=num_slots, clock=clock)
        for index, client in enumerate(clients)
    ]
    for engine in made:
        engine.gate.is_open = True
        engine.keeps("default", BASE)
    labels = LabelBook(loads.find, clock=clock, wait_s=0.3, poll_s=0.01)
    yield EnginePool(made, labels=labels, clock=clock, route_wait_s=wait_s)
    for client in clients:
        await client.aclose()


async def generate(
    pool: EnginePool,
    name: str = "r",
    affinity: str | None = None,
    timeout_s: float = 5,
    run_id: str = "",
) -> Any:
    return await pool.generate(
        PROMPT,
        request_id=f"{name}/",
        affinity=affinity or name,
        sampling=SamplingParams(max_new_tokens=8),
        stop_token_ids=(2,),
        timeout_s=timeout_s,
        run_id=run_id,
    )


def engine_of() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: [10, 11, 2])


async def test_requests_when_more_than_slots_wait_and_are_counted() -> None:
    engine = engine_of()
    async with pool_of(engine, num_slots=2) as pool:
        engine.hold.clear()
        tasks = [asyncio.ensure_future(generate(pool, f"r{i}")) for i in range(5)]
        await until(lambda: engine.num_running == 2)
        await asyncio.sleep(0.05)
        engine.hold.set()
        done = await asyncio.gather(*tasks)
        assert engine.most_running == 2
        assert max(item.waiting_s for item in done) >= 0.05
        assert pool.engines[0].meter.read().tokens_generated == 15
        assert pool.engines[0].load == 0


async def test_requests_of_a_group_when_engines_are_equal_stay_at_one() -> None:
    engines = [engine_of(), engine_of()]
    async with pool_of(*engines, num_slots=8) as pool:
        engines[0].hold.clear()
        engines[1].hold.clear()
        tasks = [
            asyncio.ensure_future(generate(pool, f"{group}{i}", group)) for group in "ab" for i in range(3)
        ]
        await until(lambda: engines[0].num_running == engines[1].num_running == 3)
        engines[0].hold.set()
        engines[1].hold.set()
        await asyncio.gather(*tasks)
        for engine in engines:
            assert len({request["rid"][0] for request in engine.requests}) == 1


async def test_request_when_no_engine_is_usable_waits_then_fails() -> None:
    async with pool_of(engine_of()) as pool:
        pool.engines[0].needs_reload = True
        with pytest.raises(EngineError, match="no engine"):
            await generate(pool)
        waiting = asyncio.ensure_future(generate(pool))
        await asyncio.sleep(0.01)
        pool.engines[0].needs_reload = False
        await pool.announce()
        assert len((await waiting).token_ids_T) == 3


async def test_request_when_its_engine_is_gone_goes_to_another() -> None:
    engines = [engine_of(), engine_of()]
    async with pool_of(*engines) as pool:
        engines[0].is_up = False
        done = await asyncio.gather(*(generate(pool, f"r{i}", "group") for i in range(6)))
        assert [len(item.token_ids_T) for item in done] == [3] * 6
        assert [engine.is_routable for engine in pool.engines] == [False, True]


async def test_request_when_the_only_engine_is_gone_waits_until_it_is_back() -> None:
    engine = engine_of()
    async with pool_of(engine, wait_s=5) as pool:
        engine.is_up = False
        tasks = [asyncio.ensure_future(generate(pool, f"r{i}")) for i in range(4)]
        await until(lambda: not pool.engines[0].is_routable)
        await asyncio.sleep(0.05)
        engine.is_up = True
        pool.engines[0].gate.is_open = True
        await pool.announce()
        assert [len((await task).token_ids_T) for task in tasks] == [3] * 4


async def test_request_when_its_engine_left_routing_while_it_waited_for_a_slot_goes_elsewhere() -> None:
    engines = [engine_of(), engine_of()]
    async with pool_of(*engines, num_slots=1) as pool:
        engines[0].hold.clear()
        engines[1].hold.clear()
        tasks = [asyncio.ensure_future(generate(pool, f"r{i}", "group")) for i in range(2)]
        await until(lambda: engines[0].num_running == 1)
        pool.engines[0].needs_reload = True
        engines[0].hold.set()
        await until(lambda: engines[1].num_running == 1)
        engines[1].hold.set()
        await asyncio.gather(*tasks)
        assert len(engines[0].requests) == 1


async def test_request_when_cancelled_is_aborted_at_the_engine() -> None:
    engine = engine_of()
    async with pool_of(engine) as pool:
        engine.hold.clear()
        task = asyncio.ensure_future(generate(pool))
        await until(lambda: engine.num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.aborted == ["r/"]
        assert pool.engines[0].meter.num_in_flight == 0
        engine.hold.set()
        await generate(pool, "next")


@pytest.mark.parametrize("state", [LoadState.REFUSED, LoadState.FAILED, LoadState.PENDING])
async def test_generation_when_its_weights_are_not_proven_is_no_data(state: LoadState) -> None:
    engine, loads = engine_of(), Loads()
    engine.label = "1.5"
    loads.states["1.5"] = state
    async with pool_of(engine, loads=loads) as pool:
        with pytest.raises(EngineError, match=f"{state} weights '1.5'"):
            await generate(pool)


async def test_generation_when_its_weights_are_proven_later_waits_and_asks_no_more() -> None:
    engine, loads = engine_of(), Loads()
    engine.label = "1.5"
    loads.states["1.5"] = LoadState.PENDING
    async with pool_of(engine, loads=loads) as pool:
        waiting = asyncio.ensure_future(generate(pool))
        await until(lambda: loads.num_asked > 1)
        assert not waiting.done()
        loads.states["1.5"] = LoadState.PROVEN
        assert (await waiting).labels == ("1.5",)
        num_asked = loads.num_asked
        await generate(pool, run_id="run_1")
        assert loads.num_asked == num_asked


async def test_generation_when_its_weights_are_those_of_another_run_is_no_data() -> None:
    engine, loads = engine_of(), Loads()
    async with pool_of(engine, loads=loads) as pool:
        with pytest.raises(EngineError, match="'default' where"):
            await generate(pool, run_id="run_1")
        engine.label = "1.5"
        loads.states["1.5"] = LoadState.PROVEN
        pool.engines[0].needs_reload = False
        await generate(pool, run_id="run_1")
        with pytest.raises(EngineError, match="weights of run run_1"):
            await generate(pool, run_id="run_2")


async def test_generation_when_the_engine_restarted_with_other_weights_takes_it_out() -> None:
    engine = engine_of()
    async with pool_of(engine) as pool:
        pool.engines[0].startups.clear()
        pool.engines[0].holds("7.2", BASE)
        with pytest.raises(EngineError, match="'default' where '7.2'"):
            await generate(pool)
        assert not pool.engines[0].is_routable


def test_F15_health_when_probes_are_mixed_changes_after_three_failures_and_two_successes() -> None:
    gate = HealthGate()
    changes = [gate.record(healthy) for healthy in (True, False, True, True)]
    assert changes == [False, False, False, True]
    assert [gate.record(healthy) for healthy in (False, False, True, False, False)] == [False] * 5
    assert gate.is_open
    assert gate.record(False)
    assert not gate.is_open


def test_meter_when_slots_are_taken_integrates_them_over_time() -> None:
    clock = ManualClock()
    meter = SlotMeter(slots=4, clock=clock)
    clock.now_s = 10  # idle
    meter.enter()
    meter.enter()
    clock.now_s = 20  # 2 slots for 10 s
    meter.set_paused(True)
    clock.now_s = 25  # paused: nothing is generated
    meter.set_paused(False)
    meter.leave(7)
    before = meter.read()
    clock.now_s = 30  # 1 slot for 5 s
    meter.leave(5)
    usage = meter.read()
    assert (usage.busy_slot_seconds, usage.seconds, usage.paused_seconds) == (25.0, 30.0, 5.0)
    assert usage.utilisation == pytest.approx(25 / 120)
    assert usage.tokens_generated == 12
    assert usage.since(before).utilisation == pytest.approx(5 / 20)


async def test_labels_when_many_wait_for_one_verdict_ask_together() -> None:
    loads = Loads()
    loads.states["1.1"] = LoadState.PENDING
    book = LabelBook(loads.find, clock=SystemClock(), wait_s=5.0, poll_s=0.05)
    waiting = [asyncio.ensure_future(book.verdict("1.1")) for _ in range(64)]
    await until(lambda: loads.num_asked >= 3)
    waiting[0].cancel()  # who leaves takes nobody along
    assert loads.num_asked < 64
    loads.states["1.1"] = LoadState.PROVEN
    found = await asyncio.gather(*waiting[1:])
    assert {load.state for load in found if load is not None} == {LoadState.PROVEN}
    num_asked = loads.num_asked
    assert await book.verdict("1.1") == found[0]
    assert loads.num_asked == num_asked, "a settled label asks nothing"
