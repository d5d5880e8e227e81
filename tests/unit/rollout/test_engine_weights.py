"""Publishing weights: one engine first, proven by its logprobs, and back where it fails."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from practicum.clock import SystemClock
from practicum.db.engine import create_engine
from practicum.errors import CheckpointError, Conflict, EngineError, Overloaded
from practicum.trajectory import SamplingParams
from services.rollout.engine.keeper import EngineKeeper
from services.rollout.engine.labels import LabelBook
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.records import Serving
from services.rollout.engine.weights import Probe, Publication, WeightPublisher
from services.rollout.store.replicas import Beat, ReplicaStore
from services.rollout.store.weights import WeightStore
from tests.fixtures.chat_models import build_chat
from tests.fixtures.rollout import until
from tests.fixtures.rollout_store import migrated
from tests.fixtures.scripted_engine import ScriptedEngine, make_engine

BASE = Serving(run_id="", weight_version=0, label="default", path="/models/base")


class PausableEngine(ScriptedEngine):
    """An engine whose updates and probes can be held up, and whose updates can break in this process."""

    def __init__(self, reply: Callable[[list[int]], list[int]]) -> None:
        super().__init__(reply)
        self.hold_update = asyncio.Event()
        self.hold_update.set()
        self.hold_score = asyncio.Event()
        self.hold_score.set()
        self.update_error: Exception | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if b"logprob_start_len" in request.content:
            await self.hold_score.wait()
        if request.url.path == "/update_weights_from_disk":
            await self.hold_update.wait()
            if self.update_error is not None:
                raise self.update_error
        return await super().__call__(request)


@dataclass
class Setup:
    engines: list[PausableEngine]
    pool: EnginePool
    publisher: WeightPublisher
    keeper: EngineKeeper
    records: WeightStore
    replicas: ReplicaStore
    taken_over: list[str]

    async def generate(self) -> Any:
        return await self.pool.generate(
            np.array([5, 6], dtype=np.int32),
            request_id="r/",
            affinity="g",
            sampling=SamplingParams(max_new_tokens=8),
            stop_token_ids=(2,),
            timeout_s=5,
        )

    async def publish(
        self,
        version: int = 1,
        path: str = "/models/v1",
        *,
        run_id: str = "run_1",
        manifest_sha256: str = "",
        probes: tuple[Probe, ...] | None = None,
        rollback: bool = False,
    ) -> Any:
        probe = Probe(
            token_ids_T=np.array([5, 6, 7], dtype=np.int32),
            logprobs_T=np.array([0, -2.0, -2.0], dtype=np.float32),
        )
        return await self.publisher.publish(
            Publication(
                run_id=run_id,
                weight_version=version,
                path=path,
                manifest_sha256=manifest_sha256,
                probes=(probe,) if probes is None else probes,
                tolerance=1e-3,
                rollback=rollback,
            )
        )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return migrated(tmp_path)


@asynccontextmanager
async def setup(
    url: str,
    num_engines: int = 1,
    *,
    engines: list[PausableEngine] | None = None,
    instance: str = "rollout-a",
    is_first: bool = True,
) -> AsyncIterator[Setup]:
    """One replica; another over the same records and engines is another."""
    database = create_engine(url)
    replicas, records = ReplicaStore(database), WeightStore(database)
    await replicas.join(Beat(instance=instance, life=instance, num_beats=0), datetime.now(UTC))
    clock, chat = SystemClock(), build_chat()
    engines = engines or [PausableEngine(lambda prompt: [10, 11, 2]) for _ in range(num_engines)]
    for engine in engines:
        engine.logprob |= {"/models/v1": -2.0, "/models/wrong": -9.0}
    clients = [httpx.AsyncClient(transport=httpx.MockTransport(engine)) for engine in engines]
    made = [
        make_engine(client, index, chat, num_slots=4, clock=clock) for index, client in enumerate(clients)
    ]
    labels = LabelBook(records.find, clock=clock, wait_s=5.0, poll_s=0.01)
    pool = EnginePool(made, labels=labels, clock=clock, route_wait_s=0.2)
    taken_over: list[str] = []
    publisher = WeightPublisher(
        pool,
        records=records,
        instance=instance,
        clock=clock,
        is_first=lambda: is_first,
        on_takeover=taken_over.append,
        lease_wait_s=0.3,
    )
    keeper = EngineKeeper(pool, publisher, probe_timeout_s=0.2)
    for of_pool in made:
        await keeper.probe(of_pool)
        await keeper.probe(of_pool)
    yield Setup(engines, pool, publisher, keeper, records, replicas, taken_over)
    await publisher.close()
    await database.dispose()
    for client in clients:
        await client.aclose()


async def test_keeper_when_engines_are_found_adopts_what_they_serve(url: str) -> None:
    async with setup(url) as made:
        assert made.pool.serving == BASE
        assert made.pool.engines[0].is_routable
        assert (await made.publish()).ok
        served, engines = made.pool.serving, made.engines
    async with setup(url, engines=engines) as made:
        assert made.pool.serving == served
        assert len(engines[0].updates) == 1, "what it holds was recognised"
    async with setup(url) as made:
        assert made.pool.serving == BASE, "it was started with another model, and nobody else is there"


async def test_publish_when_probes_agree_moves_every_engine_and_the_version(url: str) -> None:
    async with setup(url, 2) as made:
        report = await made.publish()
        assert report.ok
        assert report.weight_version == 1
        assert [result.max_logprob_diff for result in report.engines] == [0.0, 0.0]
        assert [engine.label for engine in made.engines] == ["1.1", "1.2"]
        assert made.pool.serving is not None
        assert made.pool.serving.weight_version == 1
        assert (await made.records.look()).serving == made.pool.serving
        again = await made.publish()
        assert again.ok
        assert [len(engine.updates) for engine in made.engines] == [1, 1], "twice is no second update"


async def test_publish_when_probes_disagree_goes_back_and_refuses_the_tokens_between(url: str) -> None:
    async with setup(url, 2) as made:
        report = await made.publish(path="/models/wrong")
        assert not report.ok
        assert report.weight_version == 0
        assert report.engines[0].max_logprob_diff == 7.0
        assert [engine.label for engine in made.engines] == ["0.2", "default"]
        assert made.engines[0].path == "/models/base"
        assert made.engines[1].updates == [], "the second engine was not touched"
        assert made.pool.serving == BASE
        assert (await made.records.look()).serving == BASE
        assert made.pool.engines[0].is_routable
        assert await made.publisher.is_refused("run_1", 1)
        # The same version, mended: its tokens must not be taken for those of the refused weights.
        assert (await made.publish()).ok
        assert made.engines[0].label == "1.3"
        assert made.pool.engines[0].weight_version == 1
        assert not await made.publisher.is_refused("run_1", 1)


async def test_publish_when_the_probes_are_not_numbers_goes_back(url: str) -> None:
    async with setup(url) as made:
        probe = Probe(
            token_ids_T=np.array([5, 6], dtype=np.int32),
            logprobs_T=np.array([0, np.nan], dtype=np.float32),
        )
        assert not (await made.publish(probes=(probe,))).ok
        assert made.engines[0].path == "/models/base"


async def test_publish_when_the_folder_cannot_be_loaded_restores_the_last(url: str) -> None:
    async with setup(url) as made:
        report = await made.publish(path="/models/none")
        assert not report.ok
        assert "cannot read" in report.engines[0].error
        assert made.engines[0].path == "/models/base"
        assert made.engines[0].generating.is_set()
        assert made.pool.engines[0].is_routable


async def test_D07_publish_when_a_later_engine_fails_takes_it_out_until_it_reloads(url: str) -> None:
    async with setup(url, 2) as made:
        del made.engines[1].logprob["/models/v1"]
        report = await made.publish()
        assert not report.ok
        assert report.weight_version == 1
        assert [engine.is_routable for engine in made.pool.engines] == [True, False]
        made.engines[1].logprob["/models/v1"] = -2.0
        await made.keeper.probe(made.pool.engines[1])
        assert made.pool.engines[1].is_routable
        assert made.engines[1].generating.is_set()
        assert made.engines[1].label == "1.3", "the name of the load that failed is never data"
        made.pool.engines[0].gate.close()
        assert (await made.generate()).labels == ("1.3",)
        await made.keeper.probe(made.pool.engines[1])
        assert len(made.engines[1].updates) == 2, "it holds what is served, under its own name"
        assert (await made.publish()).ok
        assert len(made.engines[1].updates) == 2
        # Where it goes back after a failure, it goes back under a name of its own.
        assert not (await made.publish(2, path="/models/wrong")).ok
        assert made.engines[1].label == "1.5"


async def test_publish_when_its_caller_leaves_goes_on_to_its_end(url: str) -> None:
    async with setup(url) as made:
        made.engines[0].hold_update.clear()
        publishing = asyncio.ensure_future(made.publish())
        await until(lambda: not made.engines[0].generating.is_set())
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        made.engines[0].hold_update.set()
        await made.publisher.close()
        assert made.engines[0].generating.is_set()
        assert made.engines[0].label == "1.1"
        assert made.pool.serving is not None
        assert made.pool.serving.weight_version == 1


async def test_load_when_cut_off_half_way_is_done_again_by_the_keeper(url: str) -> None:
    async with setup(url) as made:
        made.engines[0].update_error = RuntimeError("a defect")
        with pytest.raises(RuntimeError):
            await made.publish()
        assert not made.pool.engines[0].is_routable
        made.engines[0].update_error = None
        await made.keeper.probe(made.pool.engines[0])
        assert made.pool.engines[0].is_routable
        assert made.engines[0].generating.is_set()
        assert made.engines[0].path == "/models/base"


async def test_keeper_when_an_engine_was_left_paused_lets_it_go_on(url: str) -> None:
    engine = PausableEngine(lambda prompt: [10, 11, 2])
    engine.generating.clear()
    async with setup(url, engines=[engine]) as made:
        assert made.pool.engines[0].is_routable


async def test_publish_when_a_probe_is_not_for_these_engines_goes_back(url: str) -> None:
    async with setup(url) as made:
        probe = Probe(
            token_ids_T=np.array([5, 10**6], dtype=np.int32),
            logprobs_T=np.array([0, -2.0], dtype=np.float32),
        )
        report = await made.publish(probes=(probe,))
        assert not report.ok
        assert "input_ids" in report.engines[0].error
        assert made.engines[0].path == "/models/base"
        assert made.pool.engines[0].is_routable


async def test_publish_when_the_version_was_loaded_without_probes_proves_it(url: str) -> None:
    async with setup(url) as made:
        made.engines[0].logprob["/models/v1"] = -9.0
        assert (await made.publish(probes=())).ok
        report = await made.publish()
        assert not report.ok
        assert report.engines[0].max_logprob_diff == 7.0
        made.engines[0].logprob["/models/v1"] = -2.0
        assert (await made.publish()).ok


async def test_publish_when_what_is_served_unproven_is_refused_samples_no_more_of_it(url: str) -> None:
    async with setup(url) as made:
        made.engines[0].logprob["/models/v1"] = -9.0
        assert (await made.publish(probes=())).ok
        assert not (await made.publish()).ok
        await made.keeper.probe(made.pool.engines[0])
        assert not made.pool.engines[0].is_routable, "to load them again would take them for proven"
        with pytest.raises(EngineError):
            await made.generate()
        assert await made.publisher.is_refused("run_1", 1)
        made.engines[0].logprob["/models/v1"] = -2.0
        assert (await made.publish()).ok
        assert made.pool.engines[0].is_routable


async def test_publish_when_probes_refused_the_version_takes_it_only_with_probes(url: str) -> None:
    async with setup(url) as made:
        made.engines[0].hold_score.clear()
        refusing = asyncio.ensure_future(made.publish(path="/models/wrong"))
        await until(lambda: made.engines[0].label == "1.1")
        unproven = asyncio.ensure_future(made.publish(path="/models/wrong", probes=()))
        made.engines[0].hold_score.set()
        assert not (await refusing).ok
        with pytest.raises(EngineError, match="probes spoke against version 1"):
            await unproven
        assert made.pool.serving == BASE


async def test_lease_when_the_record_of_its_return_was_lost_is_given_back_at_the_next_look(url: str) -> None:
    async with setup(url) as made:
        assert await made.records.take_lease("rollout-a") is not None
        await made.publisher.refresh()
        assert (await made.records.look()).holder == ""


async def test_publish_when_another_run_is_served_tells_before_and_after(url: str) -> None:
    async with setup(url) as made:
        await made.publish()
        assert made.taken_over == []
        await made.publish(0, run_id="run_2")
        assert made.taken_over == ["run_1", "run_1"]


async def test_keeper_when_an_engine_missed_a_publication_loads_it_before_routing(url: str) -> None:
    async with setup(url, 2) as made:
        made.pool.engines[1].gate.close()
        assert (await made.publish()).ok
        assert made.engines[1].label == "default"
        await made.keeper.probe(made.pool.engines[1])
        assert made.engines[1].label == "1.2"
        assert not made.pool.engines[1].is_routable, "one good probe is not two"


async def test_keeper_when_a_reload_fails_looks_at_the_health_all_the_same(url: str) -> None:
    async with setup(url) as made:
        made.pool.engines[0].needs_reload = True
        made.engines[0].is_up = False
        for _ in range(3):
            await made.keeper.probe(made.pool.engines[0])
        assert not made.pool.engines[0].gate.is_open


async def test_publish_when_older_needs_rollback(url: str) -> None:
    async with setup(url) as made:
        await made.publish(2)
        with pytest.raises(Conflict, match="older"):
            await made.publish(1)
        assert (await made.publish(1, rollback=True)).weight_version == 1


async def test_publish_when_the_manifest_changed_touches_no_engine(tmp_path: Path, url: str) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    async with setup(url) as made:
        made.engines[0].logprob[str(tmp_path)] = -2.0
        with pytest.raises(CheckpointError):
            await made.publish(path=str(tmp_path), manifest_sha256="0" * 64)
        assert made.engines[0].updates == []
        assert (await made.publish(path=str(tmp_path), manifest_sha256=digest)).ok


async def test_publish_when_no_engine_is_reached_fails(url: str) -> None:
    async with setup(url) as made:
        made.engines[0].is_up = False
        for _ in range(3):
            await made.keeper.probe(made.pool.engines[0])
        with pytest.raises(EngineError, match="no engine"):
            await made.publish()


async def test_keeper_when_an_engine_restarts_with_its_first_weights_loads_the_served_ones(url: str) -> None:
    async with setup(url) as made:
        await made.publish()
        made.engines[0].label, made.engines[0].path = "default", "/models/base"
        await made.keeper.probe(made.pool.engines[0])
        assert (made.engines[0].label, made.engines[0].path) == ("1.2", "/models/v1")
        assert made.pool.engines[0].is_routable


async def test_keeper_when_asked_to_stop_stops(url: str) -> None:
    async with setup(url) as made:
        stop = asyncio.Event()
        running = asyncio.ensure_future(made.keeper.run(stop))
        await until(lambda: made.pool.engines[0].is_routable)
        stop.set()
        await asyncio.wait_for(running, timeout=5)


async def test_replicas_when_one_publishes_follow_and_the_other_may_change_nothing_meanwhile(
    url: str,
) -> None:
    async with setup(url, 2) as a, setup(url, engines=a.engines, instance="rollout-b", is_first=False) as b:
        assert b.pool.serving == BASE
        assert (await a.publish()).ok
        assert b.pool.serving == BASE
        assert (await b.generate()).labels in (("1.1",), ("1.2",)), "proven, whoever proved it"
        for engine in b.pool.engines:
            await b.keeper.probe(engine)
        assert b.pool.serving == a.pool.serving
        assert [engine.held for engine in b.pool.engines] == [a.pool.serving] * 2
        assert [len(engine.updates) for engine in a.engines] == [1, 1], "nothing was loaded again"

        a.engines[0].hold_update.clear()
        publishing = asyncio.ensure_future(a.publish(2))
        await until(lambda: not a.engines[0].generating.is_set())
        with pytest.raises(Overloaded, match="another replica"):
            await b.publish(3)
        for _ in range(4):
            await b.keeper.probe(b.pool.engines[0])
        assert b.pool.engines[0].is_routable, "an engine that another replica paused is not ill"
        a.engines[0].hold_update.set()
        assert (await publishing).ok
        assert (await b.publish(2)).ok, "asked again of another replica, it is what is served"
        assert [len(engine.updates) for engine in a.engines] == [2, 2]


async def test_replicas_when_one_refuses_weights_have_no_token_of_them(url: str) -> None:
    async with setup(url) as a, setup(url, engines=a.engines, instance="rollout-b", is_first=False) as b:
        a.engines[0].hold_score.clear()
        publishing = asyncio.ensure_future(a.publish(path="/models/wrong"))
        await until(lambda: a.engines[0].label == "1.1")
        generations = [asyncio.ensure_future(made.generate()) for made in (a, b)]
        await asyncio.sleep(0.2)
        assert not any(generation.done() for generation in generations), "they wait for the verdict"
        a.engines[0].hold_score.set()
        assert not (await publishing).ok
        for generation in generations:
            with pytest.raises(EngineError, match="refused weights"):
                await generation
        assert await b.publisher.is_refused("run_1", 1)


async def test_replicas_when_one_dies_with_an_engine_paused_load_it_again(url: str) -> None:
    async with setup(url) as a, setup(url, engines=a.engines, instance="rollout-b", is_first=False) as b:
        fence = await a.records.take_lease("rollout-a")
        assert fence is not None
        await a.records.begin_load(fence, "http://engine-0", Serving(run_id="r", weight_version=1, path="/x"))
        await a.pool.engines[0].client.pause()
        for _ in range(4):
            await b.keeper.probe(b.pool.engines[0])
        assert not a.engines[0].generating.is_set(), "its holder may be at work"
        await a.replicas.remove(Beat(instance="rollout-a", life="rollout-a", num_beats=0), as_heard=True)
        await b.keeper.probe(b.pool.engines[0])
        assert a.engines[0].generating.is_set()
        assert (a.engines[0].path, a.engines[0].label) == ("/models/base", "0.2")
        assert (await b.generate()).labels == ("0.2",)
        # The one that was only slow comes to the end of its load after all.
        a.engines[0].label = "1.1"
        with pytest.raises(EngineError, match="failed weights"):
            await b.generate()
        await b.keeper.probe(b.pool.engines[0])
        assert a.engines[0].label == "0.3"


async def test_replicas_when_an_engine_restarts_load_it_once(url: str) -> None:
    async with setup(url) as a, setup(url, engines=a.engines, instance="rollout-b", is_first=False) as b:
        assert (await a.publish()).ok
        await b.keeper.probe(b.pool.engines[0])
        a.engines[0].label, a.engines[0].path = "default", "/models/base"
        await asyncio.gather(*(made.keeper.probe(made.pool.engines[0]) for made in (a, b)))
        for made in (a, b):
            await made.keeper.probe(made.pool.engines[0])
        assert (a.engines[0].label, a.engines[0].path) == ("1.2", "/models/v1")
        assert all(made.pool.engines[0].is_routable for made in (a, b))


async def test_replica_when_another_run_is_served_elsewhere_is_told(url: str) -> None:
    async with setup(url) as a, setup(url, engines=a.engines, instance="rollout-b", is_first=False) as b:
        await a.publish()
        await b.publisher.refresh()
        await a.publish(0, run_id="run_2")
        assert b.taken_over == []
        await b.publisher.refresh()
        assert b.taken_over == ["run_1"]
        assert b.pool.serving == a.pool.serving
