"""A service process: it drains on SIGTERM and fails aloud when a worker dies."""

import asyncio
import os
import signal

import pytest
from fastapi import FastAPI

from practicum.service import run_service


async def serve(worker, closed: list[str]) -> None:  # type: ignore[no-untyped-def]
    async def close() -> None:
        closed.append("closed")

    await run_service(
        name="t", app=FastAPI(), host="127.0.0.1", port=0, rpc=None, workers={"w": worker}, close=[close]
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
