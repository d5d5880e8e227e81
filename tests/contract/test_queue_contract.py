"""What every queue promises, run against each implementation."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis.asyncio as redis

from practicum.errors import IntakeError
from practicum.ids import new_id
from practicum.queue import Queue
from practicum.queue.memory import MemoryQueue
from practicum.queue.redis_streams import RedisQueue
from practicum.v1.events_pb2 import RunChanged, StepCommitted

GROUP = "trainer"
CLAIM_AFTER_S = 0.2
MakeQueue = Callable[[], Awaitable[Queue]]


@pytest.fixture(params=["memory", "redis"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[Queue]:
    made: Queue
    if request.param == "memory":
        made = MemoryQueue(claim_after_s=CLAIM_AFTER_S, max_deliveries=3)
    else:
        url = request.getfixturevalue("redis_url")
        made = RedisQueue(url, claim_after_s=CLAIM_AFTER_S, max_deliveries=3)
    yield made
    await made.close()


@pytest.fixture
def stream() -> str:
    return f"test:{new_id('stream')}"


async def publish(queue: Queue, stream: str, count: int) -> list[str]:
    return [await queue.publish(stream, RunChanged(run_id=f"run-{i}")) for i in range(count)]


async def read(queue: Queue, stream: str, consumer: str, *, max_entries: int = 10) -> list[str]:
    entries = await queue.read(stream, GROUP, consumer, max_entries=max_entries, wait_s=0.05)
    return [entry.unpack(RunChanged).run_id for entry in entries]


async def claim(queue: Queue, stream: str, consumer: str) -> list[str]:
    """Read until something comes; bounded, since claiming takes the idle time."""
    for _ in range(40):
        if got := await read(queue, stream, consumer):
            return got
    return []


async def test_read_when_published_before_the_group_gives_everything_in_order(
    queue: Queue, stream: str
) -> None:
    await publish(queue, stream, 5)
    await queue.ensure_group(stream, GROUP)
    assert await read(queue, stream, "a", max_entries=3) == ["run-0", "run-1", "run-2"]
    assert await read(queue, stream, "a") == ["run-3", "run-4"]


async def test_read_when_empty_returns_nothing_and_wakes_for_a_new_entry(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    assert await read(queue, stream, "a") == []
    waiting = asyncio.create_task(queue.read(stream, GROUP, "a", max_entries=1, wait_s=10))
    await publish(queue, stream, 1)
    async with asyncio.timeout(5):
        assert len(await waiting) == 1


async def test_read_when_two_consumers_share_a_group_gives_each_entry_once(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    await publish(queue, stream, 4)
    first = await read(queue, stream, "a", max_entries=2)
    second = await read(queue, stream, "b", max_entries=9)
    assert first + second == ["run-0", "run-1", "run-2", "run-3"]


async def test_F03_read_when_a_consumer_dies_gives_its_entries_to_another(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    await publish(queue, stream, 2)
    assert await read(queue, stream, "dead") == ["run-0", "run-1"]
    assert await read(queue, stream, "alive") == []
    await asyncio.sleep(CLAIM_AFTER_S)
    assert await claim(queue, stream, "alive") == ["run-0", "run-1"]


async def test_give_back_when_called_gives_entries_to_another_before_their_time(
    request: pytest.FixtureRequest, queue: Queue, stream: str
) -> None:
    is_redis = isinstance(queue, RedisQueue)
    patient: Queue = (
        RedisQueue(request.getfixturevalue("redis_url"), claim_after_s=3600, max_deliveries=3)
        if is_redis
        else MemoryQueue(claim_after_s=3600, max_deliveries=3)
    )
    await publish(patient, stream, 3)
    await patient.ensure_group(stream, GROUP)
    entries = await patient.read(stream, GROUP, "a", max_entries=2, wait_s=0.05)
    assert [entry.num_deliveries for entry in entries] == [1, 1]
    ids = [entry.entry_id for entry in entries]
    await patient.give_back(stream, GROUP, "b", ids)  # not b's to give
    await patient.give_back(stream, GROUP, "a", [])
    await patient.give_back(stream, GROUP, "a", ids[:1])
    other: Queue = (
        RedisQueue(request.getfixturevalue("redis_url"), claim_after_s=3600, max_deliveries=3)
        if is_redis
        else patient
    )
    taken: list[tuple[str, int]] = []
    for _ in range(2):
        found = await other.read(stream, GROUP, "b", max_entries=10, wait_s=0.05)
        taken += [(entry.entry_id, entry.num_deliveries) for entry in found]
    assert taken[0] == (ids[0], 2), "given back: one more delivery, and none for the giving"
    assert [entry_id for entry_id, _ in taken[1:]] not in ([ids[1]], []), "the rest is what was never read"
    assert ids[1] not in [entry_id for entry_id, _ in taken]
    assert [entry.entry_id for entry in await other.read_own_pending(stream, GROUP, "a")] == [ids[1]]
    await patient.give_back(stream, GROUP, "a", ids[:1])  # b has it now, and keeps it
    assert await patient.read(stream, GROUP, "c", max_entries=10, wait_s=0.05) == []
    await patient.close()
    await other.close()


async def test_renew_when_called_in_time_keeps_entries_from_others(queue: Queue, stream: str) -> None:
    await publish(queue, stream, 2)
    await queue.ensure_group(stream, GROUP)
    entries = await queue.read(stream, GROUP, "a", max_entries=2, wait_s=0.05)
    ids = [entry.entry_id for entry in entries]
    await asyncio.sleep(1.5 * CLAIM_AFTER_S)
    await queue.renew(stream, GROUP, "b", ids)  # not b's
    found: list[str] = []
    for _ in range(40):
        await queue.renew(stream, GROUP, "a", ids[:1])
        if found := await read(queue, stream, "b"):
            break
    assert found == ["run-1"]


async def test_give_back_when_the_same_consumer_restarts_is_its_own_still(queue: Queue, stream: str) -> None:
    await publish(queue, stream, 1)
    await queue.ensure_group(stream, GROUP)
    (entry,) = await queue.read(stream, GROUP, "a", max_entries=1, wait_s=0.05)
    await queue.give_back(stream, GROUP, "a", [entry.entry_id])
    owed = await queue.read_own_pending(stream, GROUP, "a")
    assert [found.entry_id for found in owed] == [entry.entry_id]


async def test_read_when_acked_never_gives_the_entry_again(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    await publish(queue, stream, 1)
    entries = await queue.read(stream, GROUP, "a", max_entries=1, wait_s=1)
    await queue.ack(stream, GROUP, [entries[0].entry_id])
    await queue.ack(stream, GROUP, [entries[0].entry_id])
    await asyncio.sleep(CLAIM_AFTER_S)
    assert await read(queue, stream, "b") == []
    depth = await queue.depth(stream, GROUP)
    assert (depth.undelivered, depth.pending) == (0, 0)


async def test_read_own_pending_when_restarted_gives_what_was_not_acked(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    await publish(queue, stream, 3)
    entries = await queue.read(stream, GROUP, "trainer-0", max_entries=3, wait_s=1)
    await queue.ack(stream, GROUP, [entries[1].entry_id])
    owed = await queue.read_own_pending(stream, GROUP, "trainer-0")
    assert [entry.unpack(RunChanged).run_id for entry in owed] == ["run-0", "run-2"]


async def test_read_when_an_entry_always_fails_moves_it_to_the_dead_letters(
    queue: Queue, stream: str
) -> None:
    await queue.ensure_group(stream, GROUP)
    await publish(queue, stream, 1)
    assert await read(queue, stream, "a") == ["run-0"]
    for _ in range(2):
        await asyncio.sleep(CLAIM_AFTER_S)
        assert await claim(queue, stream, "a") == ["run-0"]
    await asyncio.sleep(CLAIM_AFTER_S)
    assert await claim(queue, stream, "a") == []
    dead = await queue.dead_letters(stream, GROUP)
    assert [entry.unpack(RunChanged).run_id for entry in dead] == ["run-0"]
    assert (await queue.depth(stream, GROUP)).pending == 0


async def test_F02_trim_when_entries_are_owed_removes_only_what_every_group_acked(
    queue: Queue, stream: str
) -> None:
    await queue.ensure_group(stream, GROUP)
    await queue.ensure_group(stream, "slow")
    await publish(queue, stream, 4)
    entries = await queue.read(stream, GROUP, "a", max_entries=4, wait_s=1)
    await queue.ack(stream, GROUP, [entry.entry_id for entry in entries])
    assert await queue.trim(stream) == 0
    slow = await queue.read(stream, "slow", "b", max_entries=4, wait_s=1)
    assert len(slow) == 4
    await queue.ack(stream, "slow", [slow[0].entry_id, slow[1].entry_id, slow[3].entry_id])
    assert await queue.trim(stream) == 2
    owed = await queue.read_own_pending(stream, "slow", "b")
    assert [entry.unpack(RunChanged).run_id for entry in owed] == ["run-2"]


async def test_delete_when_a_stream_is_over_leaves_nothing_of_it(
    queue: Queue, stream: str, request: pytest.FixtureRequest
) -> None:
    other = f"{stream}:of-another"
    for name in (stream, other):
        await queue.ensure_group(name, GROUP)
        await publish(queue, name, 2)
    assert await read(queue, stream, "a", max_entries=1) == ["run-0"]
    for _ in range(2):
        await asyncio.sleep(CLAIM_AFTER_S)
        await claim(queue, stream, "a")
    await asyncio.sleep(CLAIM_AFTER_S)
    await claim(queue, stream, "a")
    assert await queue.dead_letters(stream, GROUP) != []
    await queue.delete(stream)
    await queue.delete(stream)
    if isinstance(queue, RedisQueue):
        client = redis.Redis.from_url(request.getfixturevalue("redis_url"))
        assert await client.keys(f"{stream}*") == [other.encode()]
        await client.aclose()
    assert await queue.dead_letters(stream, GROUP) == []
    assert await queue.read_own_pending(stream, GROUP, "a") == []
    depth = await queue.depth(stream, GROUP)
    assert (depth.undelivered, depth.pending) == (0, 0)
    assert await read(queue, other, "a") == ["run-0", "run-1"]


async def test_delete_when_a_reader_waits_lets_it_read_what_is_published_later(
    queue: Queue, stream: str
) -> None:
    await queue.ensure_group(stream, GROUP)
    waiting = asyncio.create_task(queue.read(stream, GROUP, "a", max_entries=1, wait_s=5))
    await asyncio.sleep(0.05)
    await queue.delete(stream)
    await publish(queue, stream, 1)
    async with asyncio.timeout(5):
        entries = await waiting or await queue.read(stream, GROUP, "a", max_entries=1, wait_s=5)
    assert [entry.unpack(RunChanged).run_id for entry in entries] == ["run-0"]


async def test_unpack_when_the_type_differs_is_an_intake_error(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    await queue.publish(stream, StepCommitted(run_id="r", step=1))
    entries = await queue.read(stream, GROUP, "a", max_entries=1, wait_s=1)
    with pytest.raises(IntakeError, match="expected practicum.v1.RunChanged"):
        entries[0].unpack(RunChanged)


async def test_publish_when_the_payload_is_large_survives_compression(queue: Queue, stream: str) -> None:
    await queue.ensure_group(stream, GROUP)
    text = "x" * 600_000
    await queue.publish(stream, RunChanged(run_id=text))
    entries = await queue.read(stream, GROUP, "a", max_entries=1, wait_s=1)
    assert entries[0].envelope.encoding == "zstd"
    assert len(entries[0].envelope.payload) < 10_000
    assert entries[0].unpack(RunChanged).run_id == text
