"""The rollout's engine room against a running engine: the same calls that it makes to SGLang."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from practicum.clock import SystemClock
from practicum.db.engine import create_engine
from practicum.trajectory import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.keeper import EngineKeeper
from services.rollout.engine.labels import LabelBook
from services.rollout.engine.pool import Engine, EnginePool
from services.rollout.engine.transport import EngineTransport
from services.rollout.engine.weights import Probe, Publication, WeightPublisher
from services.rollout.episode.policy import EnginePolicy
from services.rollout.store.weights import WeightStore
from tests.fixtures.engine_models import (
    EOS_ID,
    VOCAB_SIZE,
    Reference,
    changed_copy,
    disturb,
    llama_config,
    save_random_model,
)
from tests.fixtures.engine_server import cpu_engine
from tests.fixtures.rollout import until
from tests.fixtures.rollout_store import migrated

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one shape."""
    root = tmp_path_factory.mktemp("models")
    base = save_random_model(root / "base", llama_config())
    return base, changed_copy(base, root / "other", disturb)


@asynccontextmanager
async def served(url: str, folder: Path) -> AsyncIterator[tuple[EnginePool, WeightPublisher]]:
    database = create_engine(migrated(folder))
    records = WeightStore(database)
    clock = SystemClock()
    async with httpx.AsyncClient(transport=EngineTransport()) as http:
        client = EngineClient(
            http, engine_id="engine-0", base_url=url, vocab_size=VOCAB_SIZE, context_length=2048
        )
        labels = LabelBook(records.find, clock=clock)
        pool = EnginePool([Engine(client, num_slots=16, clock=clock)], labels=labels, clock=clock)
        publisher = WeightPublisher(pool, records=records, instance="rollout-1", clock=clock)
        keeper = EngineKeeper(pool, publisher)
        for _ in range(2):
            await keeper.probe(pool.engines[0])
        yield pool, publisher
    await database.dispose()


def probe_of(folder: Path, ids: list[int]) -> Probe:
    """A probe as the trainer scores it: with transformers, from the folder."""
    logprobs = [0.0, *Reference(folder).logprobs(ids, 1)]
    return Probe(token_ids_T=np.array(ids, dtype=np.int32), logprobs_T=np.array(logprobs, dtype=np.float32))


async def test_publish_when_engines_are_real_is_proven_by_logprobs_and_undone_when_wrong(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, other = folders
    prompt = np.arange(10, 40, dtype=np.int32)
    with cpu_engine(base) as (url, _):
        async with served(url, tmp_path) as (pool, publisher):
            policy = EnginePolicy(
                pool,
                run_id="",
                affinity="g",
                sampling=SamplingParams(temperature=0.7),
                stop_token_ids=(EOS_ID,),
                timeout_s=60,
            )

            async def play(name: str, num_tokens: int) -> tuple[list[int], list[float], list[int]]:
                turn = await policy.generate(prompt, request_id=f"{name}/", max_new_tokens=num_tokens)
                versions = [span.weight_version for span in turn.version_spans]
                return turn.token_ids_T.tolist(), turn.logprobs_T.tolist(), versions

            ids, logprobs, versions = await play("a", 24)
            assert versions == [0]
            expected = Reference(base).logprobs([*prompt.tolist(), *ids], len(prompt), 0.7)
            assert logprobs == pytest.approx(expected, abs=TOLERANCE)

            # In the middle of long turns: none is lost, and each says which weights made which token.
            running = [asyncio.ensure_future(play(f"long-{i}", 600)) for i in range(4)]
            await until(lambda: pool.engines[0].meter.num_in_flight == 4)
            await asyncio.sleep(0.1)
            report = await publisher.publish(
                Publication(
                    run_id="run_1",
                    weight_version=1,
                    path=str(other),
                    probes=(probe_of(other, [5, 9, 77, 12, 200]),),
                    tolerance=TOLERANCE,
                )
            )
            assert report.ok, report
            turns = await asyncio.gather(*running)
            assert {tuple(versions) for _, _, versions in turns} <= {(0,), (0, 1), (1,)}
            ids, logprobs, versions = await play("b", 24)
            assert versions == [1]
            expected = Reference(other).logprobs([*prompt.tolist(), *ids], len(prompt), 0.7)
            assert logprobs == pytest.approx(expected, abs=TOLERANCE), "nothing of the old prefix is left"

            wrong = await publisher.publish(
                Publication(
                    run_id="run_1",
                    weight_version=2,
                    path=str(base),
                    probes=(probe_of(other, [5, 9, 77, 12, 200]),),
                    tolerance=TOLERANCE,
                )
            )
            assert not wrong.ok
            assert wrong.weight_version == 1
            assert wrong.engines[0].max_logprob_diff > TOLERANCE
            ids, logprobs, versions = await play("c", 24)
            assert versions == [1]
            expected = Reference(other).logprobs([*prompt.tolist(), *ids], len(prompt), 0.7)
            assert logprobs == pytest.approx(expected, abs=TOLERANCE)
