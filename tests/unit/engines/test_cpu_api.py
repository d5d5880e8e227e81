"""What the engine's HTTP edge says about the process: alive, ready, and its figures."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.cpu.api import create_app
from engines.cpu.batcher import Batcher
from engines.cpu.main import build, parse_arguments
from tests.fixtures.engine_models import llama_config, save_random_model

PROMPT = list(range(5, 105))
Figures = dict[str, float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), llama_config())


@pytest.fixture
def built(folder: Path) -> Iterator[tuple[Batcher, httpx.ASGITransport]]:
    arguments = ["--model", str(folder), "--port", "1", "--max-running-requests", "1"]
    batcher, api = build(parse_arguments([*arguments, "--weight-version", "7"]))
    batcher.start()
    try:
        yield batcher, httpx.ASGITransport(create_app(api))
    finally:
        batcher.stop()


@pytest.fixture
async def client(built: tuple[Batcher, httpx.ASGITransport]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=built[1], base_url="http://engine") as made:
        yield made


async def figures(client: httpx.AsyncClient) -> Figures:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return {
        sample.name.removeprefix("practicum_engine_"): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def generate(client: httpx.AsyncClient, **options: object) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, **options}
    assert (await client.post("/generate", json=body)).status_code == 200


async def test_metrics_when_tokens_were_generated_count_them(client: httpx.AsyncClient) -> None:
    assert await figures(client) == {
        "running_requests": 0,
        "waiting_requests": 0,
        "paused": 0,
        "generated_tokens_total": 0,
        "prompt_tokens_total": 0,
        "cached_tokens_total": 0,
        "weight_updates_total": 0,
        "weight_version": 7,
    }
    await generate(client)
    first = await figures(client)
    assert (first["generated_tokens_total"], first["prompt_tokens_total"]) == (4, len(PROMPT))
    assert first["cached_tokens_total"] == 0
    await generate(client)
    second = await figures(client)
    assert (second["generated_tokens_total"], second["prompt_tokens_total"]) == (8, 2 * len(PROMPT))
    assert 0 < second["cached_tokens_total"] < len(PROMPT)


async def test_metrics_when_weights_change_count_and_name_them(
    client: httpx.AsyncClient, folder: Path
) -> None:
    update = {"model_path": str(folder), "weight_version": "8"}
    assert (await client.post("/update_weights_from_disk", json=update)).status_code == 200
    after = await figures(client)
    assert (after["weight_updates_total"], after["weight_version"]) == (1, 8)
    refused = {"model_path": str(folder / "none"), "weight_version": "9"}
    assert (await client.post("/update_weights_from_disk", json=refused)).status_code == 400
    assert await figures(client) == after
    named = {"model_path": str(folder), "weight_version": "run-a"}
    assert (await client.post("/update_weights_from_disk", json=named)).status_code == 200
    assert "weight_version" not in await figures(client)


async def test_readiness_when_paused_is_503_while_the_process_is_healthy(
    client: httpx.AsyncClient,
) -> None:
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"engine": "ok"})
    await client.post("/pause_generation", json={"mode": "retract"})
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"engine": "paused"})
    healthy = await client.get("/healthz")
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})
    assert (await figures(client))["paused"] == 1
    await client.post("/continue_generation", json={})
    assert (await client.get("/readyz")).status_code == 200
    assert (await figures(client))["paused"] == 0


async def test_health_when_the_worker_has_ended_is_503(
    client: httpx.AsyncClient, built: tuple[Batcher, httpx.ASGITransport]
) -> None:
    built[0].stop()
    assert (await client.get("/healthz")).status_code == 503
    assert (await client.get("/readyz")).json() == {"engine": "the worker has ended"}


async def test_metrics_when_requests_run_and_wait_show_both(client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as both, asyncio.timeout(20):
        for _ in range(2):
            both.create_task(generate(client, sampling_params={"max_new_tokens": 1500, "ignore_eos": True}))
        while (shown := await figures(client))["running_requests"] + shown["waiting_requests"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (shown["running_requests"], shown["waiting_requests"]) == (1, 1)
        await client.post("/abort_request", json={"abort_all": True})
