"""A service process: it drains on SIGTERM and fails aloud when a worker dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from fastapi import FastAPI

from practicum.cli.ports import free_port
from practicum.rest.app import create_app
from practicum.service import Worker, run_service

HANGS = """
import time
from practicum.service import _ended_at_the_latest
with _ended_at_the_latest(0.2):
    time.sleep(60)
"""


async def serve(
    worker: Worker,
    closed: list[str],
    *,
    app: FastAPI | None = None,
    port: int = 0,
    drain_timeout_s: float = 10.0,
) -> None:
    async def close() -> None:
        closed.append("closed")

    await run_service(
        name="t",
        app=app or FastAPI(),
        host="127.0.0.1",
        port=port,
        rpc=None,
        workers={"w": worker},
        close=[close],
        drain_timeout_s=drain_timeout_s,
    )


async def test_run_service_when_sigterm_comes_lets_the_worker_finish_then_closes() -> None:
    events: list[str] = []

    async def worker(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        await asyncio.sleep(0)
        events.append("drained")

    async with asyncio.timeout(20):
        await serve(worker, events)
    assert events == ["drained", "closed"]


async def test_run_service_when_a_worker_raises_ends_with_its_error_and_closes() -> None:
    events: list[str] = []

    async def worker(stop: asyncio.Event) -> None:
        raise ValueError("broken")

    async with asyncio.timeout(20):
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken"), flatten_subgroups=True):
            await serve(worker, events)
    assert events == ["closed"]


async def test_run_service_when_it_drains_answers_503_and_lives() -> None:
    answers: dict[str, httpx.Response] = {}
    port = free_port()
    app = create_app(title="t", description="t", token="t", routers=[], readiness={})

    async def worker(stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            while not answers:
                try:
                    answers["before"] = await http.get("/readyz")
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            for path in ("/readyz", "/healthz", "/metrics", "/v1/runs"):
                answers[path] = await http.get(path)

    async with asyncio.timeout(20):
        await serve(worker, [], app=app, port=port)
    statuses = {path: answer.status_code for path, answer in answers.items()}
    assert statuses == {"before": 200, "/readyz": 503, "/healthz": 200, "/metrics": 200, "/v1/runs": 503}
    assert "draining" in answers["/readyz"].json()["detail"]
    assert int(answers["/v1/runs"].headers["Retry-After"]) > 0


async def test_run_service_when_a_worker_passes_the_limit_cancels_it_and_lets_it_give_back() -> None:
    events: list[str] = []

    async def worker(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            events.append("given back")
            raise

    async with asyncio.timeout(20):
        await serve(worker, events, drain_timeout_s=0.1)
    assert events == ["given back", "closed"]


def test_process_when_something_hangs_past_the_limit_ends_all_the_same() -> None:
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "service.ended_at_the_limit" in done.stdout + done.stderr) == (0, True)
    assert time.monotonic() - started_s < 30
