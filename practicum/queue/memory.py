"""The queue in one process: for tests and for anyone who embeds a service.

Holds the promises of `base` within the process's life. Waiting readers are woken by a condition,
never by polling.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from practicum.clock import Clock, SystemClock
from practicum.queue.base import Depth, Entry, seal
from practicum.v1.events_pb2 import Envelope


@dataclass(slots=True)
class _Pending:
    consumer: str
    delivered_at_s: float
    num_deliveries: int


@dataclass(slots=True)
class _Group:
    next_index: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict)
    dead: list[Entry] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    first_index: int = 0
    entries: list[Envelope] = field(default_factory=list)
    groups: dict[str, _Group] = field(default_factory=dict)

    def end_index(self) -> int:
        return self.first_index + len(self.entries)


class MemoryQueue:
    """A `Queue` whose streams live in this process."""

    def __init__(
        self, *, clock: Clock | None = None, claim_after_s: float = 60.0, max_deliveries: int = 5
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._claim_after_s = claim_after_s
        self._max_deliveries = max_deliveries
        self._streams: dict[str, _Stream] = {}
        self._changed = asyncio.Condition()

    async def publish(self, stream: str, message: Message, *, traceparent: str = "") -> str:
        """Append a message and return its entry id."""
        envelope = seal(message, clock=self._clock, traceparent=traceparent)
        async with self._changed:
            held = self._stream(stream)
            held.entries.append(envelope)
            self._changed.notify_all()
            return str(held.end_index() - 1)

    async def ensure_group(self, stream: str, group: str) -> None:
        """Make a group that starts at the stream's beginning."""
        held = self._stream(stream)
        held.groups.setdefault(group, _Group(next_index=held.first_index))

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, wait_s: float
    ) -> list[Entry]:
        """Stale entries of others first, then new ones; [] after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                while True:
                    # Again after every wait: the stream may have been removed and begun anew.
                    await self.ensure_group(stream, group)
                    taken = self._take(self._stream(stream), group, consumer, max_entries)
                    if taken:
                        return taken
                    await self._changed.wait()
        except TimeoutError:
            return []

    async def read_own_pending(self, stream: str, group: str, consumer: str) -> list[Entry]:
        """Everything delivered to this consumer name and not acknowledged."""
        await self.ensure_group(stream, group)
        held = self._stream(stream)
        own = [
            (index, pending)
            for index, pending in sorted(held.groups[group].pending.items())
            if pending.consumer == consumer
        ]
        return [self._entry(held, index, pending.num_deliveries) for index, pending in own]

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Mark entries as done."""
        await self.ensure_group(stream, group)
        pending = self._stream(stream).groups[group].pending
        for entry_id in entry_ids:
            pending.pop(int(entry_id), None)

    async def give_back(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Let entries count as stale at once."""
        await self._set_delivered(stream, group, consumer, entry_ids, at_s=-math.inf)

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Let entries count as delivered just now."""
        await self._set_delivered(stream, group, consumer, entry_ids, at_s=self._clock.monotonic())

    async def _set_delivered(
        self, stream: str, group: str, consumer: str, entry_ids: Sequence[str], *, at_s: float
    ) -> None:
        await self.ensure_group(stream, group)
        pending = self._stream(stream).groups[group].pending
        async with self._changed:
            for entry_id in entry_ids:
                held = pending.get(int(entry_id))
                if held is not None and held.consumer == consumer:
                    held.delivered_at_s = at_s
            self._changed.notify_all()

    async def dead_letters(self, stream: str, group: str) -> list[Entry]:
        """Entries that failed `max_deliveries` times."""
        await self.ensure_group(stream, group)
        return list(self._stream(stream).groups[group].dead)

    async def depth(self, stream: str, group: str) -> Depth:
        """What the group has before it."""
        await self.ensure_group(stream, group)
        held = self._stream(stream)
        own = held.groups[group]
        return Depth(undelivered=held.end_index() - own.next_index, pending=len(own.pending))

    async def trim(self, stream: str) -> int:
        """Remove what every group has acknowledged."""
        held = self._stream(stream)
        if not held.groups:
            return 0
        lowest = min(min([own.next_index, *own.pending]) for own in held.groups.values())
        num_removed = lowest - held.first_index
        del held.entries[:num_removed]
        held.first_index = lowest
        return num_removed

    async def delete(self, stream: str) -> None:
        """Remove a stream with its groups and dead letters."""
        self._streams.pop(stream, None)

    async def ping(self) -> None:
        """A queue in memory can always be used."""

    async def close(self) -> None:
        """Nothing to give back."""

    def _stream(self, name: str) -> _Stream:
        return self._streams.setdefault(name, _Stream())

    def _entry(self, held: _Stream, index: int, num_deliveries: int) -> Entry:
        envelope = held.entries[index - held.first_index]
        return Entry(entry_id=str(index), envelope=envelope, num_deliveries=num_deliveries)

    def _take(self, held: _Stream, group: str, consumer: str, max_entries: int) -> list[Entry]:
        own = held.groups[group]
        now_s = self._clock.monotonic()
        taken: list[Entry] = []
        for index, pending in sorted(own.pending.items()):
            if len(taken) == max_entries:
                return taken
            if now_s - pending.delivered_at_s < self._claim_after_s:
                continue
            if pending.num_deliveries >= self._max_deliveries:
                own.dead.append(self._entry(held, index, pending.num_deliveries))
                del own.pending[index]
                continue
            renewed = _Pending(consumer, now_s, pending.num_deliveries + 1)
            own.pending[index] = renewed
            taken.append(self._entry(held, index, renewed.num_deliveries))
        while own.next_index < held.end_index() and len(taken) < max_entries:
            index = own.next_index
            own.next_index += 1
            own.pending[index] = _Pending(consumer, now_s, 1)
            taken.append(self._entry(held, index, 1))
        return taken
