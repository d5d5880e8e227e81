"""Reports about Redis as a queue, each as a test named by its id. The server is real."""

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from practicum.cli.binaries import redis_server_path
from practicum.cli.ports import free_port
from practicum.errors import QueueError, QueueFull
from practicum.queue.memory import MemoryQueue
from practicum.queue.redis_streams import RedisQueue
from practicum.v1.events_pb2 import RunChanged

STREAM, GROUP = "case:stream", "group"


@pytest.fixture
def small_redis(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own with 3 MB of memory, to be filled, reconfigured and emptied."""
    port = free_port()
    command = [redis_server_path(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    command += ["--save", "", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with redis.Redis(port=port) as client:
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server did not answer"
                time.sleep(0.02)
    yield f"redis://127.0.0.1:{port}/0"
    server.terminate()
    server.wait(timeout=20)


def incompressible(size_bytes: int) -> RunChanged:
    return RunChanged(run_id="".join(random.Random(1).choices("abcdefghijklmnop0123456789", k=size_bytes)))


async def test_F05_publish_when_redis_is_full_is_typed_back_pressure(small_redis: str) -> None:
    queue = RedisQueue(small_redis)
    with pytest.raises(QueueFull):
        for _ in range(12):
            await queue.publish(STREAM, incompressible(1_000_000))
    await queue.ping()
    await queue.close()


async def test_F05_ping_when_redis_would_evict_entries_refuses(small_redis: str) -> None:
    with redis.Redis.from_url(small_redis) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    queue = RedisQueue(small_redis)
    with pytest.raises(QueueError, match="allkeys-lru"):
        await queue.ping()
    await queue.close()


async def test_F06_read_when_another_call_was_cancelled_gets_its_own_answer(redis_url: str) -> None:
    queue = RedisQueue(redis_url)
    await queue.ensure_group("case:quiet", GROUP)
    await queue.ensure_group("case:busy", GROUP)
    for number in range(20):
        await queue.publish("case:busy", RunChanged(run_id=str(number)))
        waiting = asyncio.create_task(queue.read("case:quiet", GROUP, "a", max_entries=1, wait_s=5))
        await asyncio.sleep(0.005 * (number % 3))  # cancelled before, while and after it is sent
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        entries = await queue.read("case:busy", GROUP, "a", max_entries=9, wait_s=5)
        assert [entry.unpack(RunChanged).run_id for entry in entries] == [str(number)]
    await queue.close()


async def test_F20_read_when_redis_restarts_empty_makes_its_group_again(small_redis: str) -> None:
    queue = RedisQueue(small_redis)
    await queue.publish(STREAM, RunChanged(run_id="lost"))
    await queue.ensure_group(STREAM, GROUP)
    with redis.Redis.from_url(small_redis) as client:
        client.flushall()
    assert await queue.read(STREAM, GROUP, "a", max_entries=1, wait_s=0.05) == []
    await queue.publish(STREAM, RunChanged(run_id="owed, sent again"))
    entries = await queue.read(STREAM, GROUP, "a", max_entries=1, wait_s=5)
    assert [entry.unpack(RunChanged).run_id for entry in entries] == ["owed, sent again"]
    await queue.close()


async def test_D19_read_when_the_queue_stays_empty_gives_an_empty_list_and_never_none() -> None:
    queue = MemoryQueue()
    for _ in range(3):
        assert await queue.read(STREAM, GROUP, "a", max_entries=1, wait_s=0.01) == []
