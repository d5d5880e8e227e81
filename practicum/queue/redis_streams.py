"""The queue on Redis Streams with consumer groups.

Owns the key schema: stream `S` holds one field `e` (a serialised Envelope) an entry; group `G`'s
dead letters live in stream `S:dead:G`. Redis is transport: whoever publishes keeps the truth in SQL
and can publish again. Streams are never trimmed by length, only behind the lowest id that some
group still owes. redis-py is pinned at a release whose cancelled calls close their connection.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as redis
from google.protobuf.message import Message
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from practicum.clock import Clock, SystemClock
from practicum.errors import QueueError, QueueFull
from practicum.queue.base import Depth, Entry, seal
from practicum.v1.events_pb2 import Envelope

_FIELD = b"e"
# How Redis says that a stream or its group is not there: to a new read, and to one that waited.
_GONE = ("NOGROUP", "UNBLOCKED")
_MAX_PENDING = 10_000
_EVICTING_POLICIES = frozenset({"allkeys-lru", "allkeys-lfu", "allkeys-random"})


class RedisQueue:
    """A `Queue` over one Redis server."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        claim_after_s: float = 60.0,
        max_deliveries: int = 5,
        call_timeout_s: float = 30.0,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._claim_after_ms = int(claim_after_s * 1000)
        self._max_deliveries = max_deliveries
        self._call_timeout_s = call_timeout_s
        self._client: Any = redis.Redis.from_url(url, socket_timeout=call_timeout_s)
        self._next_claim_s: dict[tuple[str, str], float] = {}

    async def publish(self, stream: str, message: Message, *, traceparent: str = "") -> str:
        """Append a message and return its entry id; `QueueFull` where Redis has no memory left."""
        envelope = seal(message, clock=self._clock, traceparent=traceparent)
        async with _as_queue_errors():
            entry_id = await self._client.xadd(stream, {_FIELD: envelope.SerializeToString()})
        return _text(entry_id)

    async def ensure_group(self, stream: str, group: str) -> None:
        """Make a group that starts at the stream's beginning."""
        async with _as_queue_errors():
            try:
                await self._client.xgroup_create(stream, group, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, wait_s: float
    ) -> list[Entry]:
        """Stale entries of others first, then new ones; [] after `wait_s`."""
        async with _as_queue_errors():
            claimed = await self._claim_stale(stream, group, consumer, max_entries)
            if claimed:
                return claimed
            # Redis reads a block of 0 as "for ever"; a bounded wait is all a caller may ask for.
            block_ms = max(1, int(min(wait_s, self._call_timeout_s / 2) * 1000))
            try:
                reply = await self._client.xreadgroup(
                    group, consumer, {stream: ">"}, count=max_entries, block=block_ms
                )
            except ResponseError as error:
                if not any(word in str(error) for word in _GONE):
                    raise
                # The stream was removed, or Redis was restarted empty: the group is made again, and
                # the owner re-publishes.
                await self.ensure_group(stream, group)
                return []
        return [self._entry(raw, 1) for _, entries in _pairs(reply) for raw in entries]

    async def read_own_pending(self, stream: str, group: str, consumer: str) -> list[Entry]:
        """Everything delivered to this consumer name and not acknowledged."""
        await self.ensure_group(stream, group)
        owed: list[Entry] = []
        last_id = "0"
        async with _as_queue_errors():
            while True:
                reply = await self._client.xreadgroup(group, consumer, {stream: last_id}, count=256)
                page = [raw for _, entries in _pairs(reply) for raw in entries]
                if not page:
                    return owed
                owed += [self._entry(raw, 2) for raw in page if raw[1]]
                last_id = _text(page[-1][0])

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Mark entries as done."""
        if entry_ids:
            async with _as_queue_errors():
                await self._client.xack(stream, group, *entry_ids)

    async def give_back(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Let entries count as stale at once: others look every quarter of the claim time."""
        await self._set_idle(stream, group, consumer, entry_ids, idle_ms=self._claim_after_ms)

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Let entries count as delivered just now."""
        await self._set_idle(stream, group, consumer, entry_ids, idle_ms=0)

    async def _set_idle(
        self, stream: str, group: str, consumer: str, entry_ids: Sequence[str], *, idle_ms: int
    ) -> None:
        if entry_ids:
            async with _as_queue_errors():
                # Only what is still this consumer's: another may have claimed an entry meanwhile.
                owned = await self._client.xpending_range(
                    stream, group, min="-", max="+", count=_MAX_PENDING, consumername=consumer
                )
                ids = {_text(item["message_id"]) for item in owned} & set(entry_ids)
                if ids:
                    await self._client.xclaim(
                        stream, group, consumer, 0, sorted(ids), idle=idle_ms, justid=True
                    )

    async def dead_letters(self, stream: str, group: str) -> list[Entry]:
        """Entries that failed `max_deliveries` times."""
        async with _as_queue_errors():
            raws = await self._client.xrange(_dead_stream(stream, group))
        return [self._entry(raw, self._max_deliveries) for raw in raws]

    async def depth(self, stream: str, group: str) -> Depth:
        """What the group has before it."""
        await self.ensure_group(stream, group)
        async with _as_queue_errors():
            for info in await self._client.xinfo_groups(stream):
                if _text(info["name"]) == group:
                    lag = info.get("lag")  # Redis 7 and later, and even there not always known
                    last_id = info["last-delivered-id"]
                    undelivered = int(lag) if lag is not None else await self._num_after(stream, last_id)
                    return Depth(undelivered=undelivered, pending=int(info["pending"]))
        raise QueueError(f"group {group} of stream {stream} vanished")

    async def _num_after(self, stream: str, entry_id: bytes | str) -> int:
        num_entries, last_id = 0, _text(entry_id)
        while page := await self._client.xrange(stream, min=f"({last_id}", count=1000):
            num_entries += len(page)
            last_id = _text(page[-1][0])
        return num_entries

    async def trim(self, stream: str) -> int:
        """Remove what every group has acknowledged."""
        async with _as_queue_errors():
            lowest: tuple[int, int] | None = None
            for info in await self._client.xinfo_groups(stream):
                owed = await self._client.xpending(stream, _text(info["name"]))
                first = owed["min"] if owed["pending"] else None
                # Without a pending entry everything up to the last delivered id is done.
                bound = _id_pair(first) if first else _after(_id_pair(info["last-delivered-id"]))
                lowest = bound if lowest is None else min(lowest, bound)
            if lowest is None:
                return 0
            return int(await self._client.xtrim(stream, minid=f"{lowest[0]}-{lowest[1]}", approximate=False))

    async def delete(self, stream: str) -> None:
        """Remove a stream with its groups and dead letters."""
        async with _as_queue_errors():
            if not await self._client.exists(stream):
                return
            groups = [_text(info["name"]) for info in await self._client.xinfo_groups(stream)]
            # At once, since only the stream knows the groups that name its dead letters.
            await self._client.delete(stream, *(_dead_stream(stream, group) for group in groups))
        for key in [key for key in self._next_claim_s if key[0] == stream]:
            del self._next_claim_s[key]

    async def ping(self) -> None:
        """Raise `QueueError` where Redis is away or would evict entries."""
        async with _as_queue_errors():
            await self._client.ping()
            config: Any = await self._client.config_get("maxmemory-policy")
        policy = _text(next(iter(config.values()), ""))
        if policy in _EVICTING_POLICIES:
            raise QueueError(f"Redis evicts keys (maxmemory-policy {policy}); set it to noeviction")

    async def close(self) -> None:
        """Give connections back."""
        await self._client.aclose()

    async def _claim_stale(self, stream: str, group: str, consumer: str, max_entries: int) -> list[Entry]:
        # Looking for stale entries costs a round trip, so it is done at most 4 times per claim time.
        now_s = self._clock.monotonic()
        if now_s < self._next_claim_s.get((stream, group), 0.0):
            return []
        self._next_claim_s[stream, group] = now_s + self._claim_after_ms / 4000
        try:
            stale = await self._client.xpending_range(
                stream, group, min="-", max="+", count=max_entries, idle=self._claim_after_ms
            )
        except ResponseError as error:
            if "NOGROUP" in str(error):
                return []
            raise
        deliveries = {_text(item["message_id"]): int(item["times_delivered"]) for item in stale}
        poison = [entry_id for entry_id, n in deliveries.items() if n >= self._max_deliveries]
        for entry_id in poison:
            await self._bury(stream, group, entry_id)
        live = [entry_id for entry_id in deliveries if entry_id not in poison]
        if not live:
            return []
        raws = await self._client.xclaim(stream, group, consumer, self._claim_after_ms, live)
        self._next_claim_s[stream, group] = now_s  # there may be more
        return [self._entry(raw, deliveries[_text(raw[0])] + 1) for raw in raws if raw and raw[1]]

    async def _bury(self, stream: str, group: str, entry_id: str) -> None:
        raws = await self._client.xrange(stream, min=entry_id, max=entry_id)
        async with self._client.pipeline(transaction=True) as pipe:
            if raws:
                pipe.xadd(_dead_stream(stream, group), {_FIELD: raws[0][1][_FIELD]})
            pipe.xack(stream, group, entry_id)
            await pipe.execute()

    def _entry(self, raw: Any, num_deliveries: int) -> Entry:
        envelope = Envelope()
        envelope.ParseFromString(raw[1][_FIELD])
        return Entry(entry_id=_text(raw[0]), envelope=envelope, num_deliveries=num_deliveries)


def _dead_stream(stream: str, group: str) -> str:
    return f"{stream}:dead:{group}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _id_pair(entry_id: bytes | str) -> tuple[int, int]:
    milliseconds, _, sequence = _text(entry_id).partition("-")
    return int(milliseconds), int(sequence or 0)


def _after(pair: tuple[int, int]) -> tuple[int, int]:
    return pair[0], pair[1] + 1


def _pairs(reply: Any) -> list[tuple[Any, list[Any]]]:
    """The reply of XREADGROUP as (stream, entries), whichever protocol version answered."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [
            (name, [raw for chunk in chunks for raw in (chunk if isinstance(chunk, list) else [chunk])])
            for name, chunks in reply.items()
        ]
    return [(name, entries) for name, entries in reply]


@asynccontextmanager
async def _as_queue_errors() -> AsyncIterator[None]:
    try:
        yield
    except OutOfMemoryError as error:
        raise QueueFull("Redis has reached maxmemory and takes no more entries") from error
    except (RedisError, OSError, TimeoutError) as error:
        raise QueueError(f"Redis: {error}") from error
