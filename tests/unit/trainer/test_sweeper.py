"""Streams of runs that are over do not stay."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from practicum.clock import SystemClock
from practicum.db.migrate import upgrade
from practicum.errors import QueueError
from practicum.queue.memory import MemoryQueue
from practicum.queue.streams import trajectories as stream_of
from practicum.v1.events_pb2 import RunChanged
from services.trainer.spec import RunState
from services.trainer.store import MIGRATIONS, TrainerStore, open_store
from services.trainer.sweeper import StreamSweeper
from tests.fixtures.trainer import rl_spec

GROUP = "trainer"


class LateQueue(MemoryQueue):
    """A queue that is away for the first removal."""

    is_away = True

    async def delete(self, stream: str) -> None:
        """Refuse once."""
        if self.is_away:
            self.is_away = False
            raise QueueError("connection refused")
        await super().delete(stream)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TrainerStore]:
    url = f"sqlite:///{tmp_path}/trainer.sqlite"
    upgrade(url, MIGRATIONS)
    opened = open_store(url, SystemClock())
    yield opened
    await opened.engine.dispose()


async def num_held(queue: MemoryQueue, run_id: str) -> int:
    return (await queue.depth(stream_of(run_id), GROUP)).undelivered


async def until_empty(queue: MemoryQueue, run_id: str) -> None:
    while True:
        if await num_held(queue, run_id) == 0:
            return
        await asyncio.sleep(0.01)


async def test_sweep_when_runs_are_over_removes_their_streams_and_no_other(store: TrainerStore) -> None:
    queue = LateQueue()
    over, going = [(await store.runs.create(rl_spec())).run_id for _ in range(2)]
    await store.runs.change_state(over, RunState.STOPPED, allowed={RunState.PENDING})
    for run_id in (over, going):
        await queue.publish(stream_of(run_id), RunChanged(run_id=run_id))
    stop = asyncio.Event()
    sweeping = asyncio.create_task(StreamSweeper(store, queue, SystemClock(), every_s=0.02).run(stop))
    async with asyncio.timeout(10):
        await until_empty(queue, over)
        # A grade that was on its way begins the stream anew.
        await queue.publish(stream_of(over), RunChanged(run_id=over))
        await until_empty(queue, over)
        stop.set()
        await sweeping
    assert await num_held(queue, going) == 1
