"""What a queue promises, whatever carries it.

Delivery is at least once and in order within a stream; a consumer that dies leaves its entries to
the others; an entry that fails `max_deliveries` times moves to the dead letters of its group. An
entry leaves the stream only when every group has acknowledged it, never by length, or with the whole
stream. Consumers must therefore be idempotent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import zstandard
from google.protobuf.message import DecodeError, Message

from practicum.clock import Clock
from practicum.errors import IntakeError, QueueError
from practicum.ids import new_event_id
from practicum.v1.events_pb2 import Envelope
from practicum.wire import timestamp_to_pb

COMPRESS_ABOVE_BYTES = 256 * 1024
MAX_ENTRY_BYTES = 512 * 1024 * 1024  # the hard bound of a Redis string

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One delivery of one message."""

    entry_id: str
    envelope: Envelope
    num_deliveries: int

    def unpack(self, message_type: type[M]) -> M:
        """The payload as `message_type`; `IntakeError` where it is something else or broken."""
        wanted = message_type.DESCRIPTOR.full_name
        if self.envelope.type != wanted:
            raise IntakeError("wrong_type", f"expected {wanted}, got {self.envelope.type or 'nothing'}")
        payload = self.envelope.payload
        try:
            if self.envelope.encoding == "zstd":
                payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=MAX_ENTRY_BYTES)
            message = message_type()
            message.ParseFromString(payload)
        except (zstandard.ZstdError, DecodeError) as error:
            raise IntakeError("unreadable", f"payload of {wanted} cannot be read: {error}") from error
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What a group has before it."""

    undelivered: int
    pending: int  # delivered, not acknowledged


class Queue(Protocol):
    """A set of streams, each read by named groups of consumers."""

    async def publish(self, stream: str, message: Message, *, traceparent: str = "") -> str:
        """Append a message and return its entry id. `QueueFull` where there is no room."""
        ...

    async def ensure_group(self, stream: str, group: str) -> None:
        """Make a group that starts at the stream's beginning; making it twice is no error."""
        ...

    async def read(
        self, stream: str, group: str, consumer: str, *, max_entries: int, wait_s: float
    ) -> list[Entry]:
        """Entries for this consumer: stale ones of others first, then new; [] after `wait_s`."""
        ...

    async def read_own_pending(self, stream: str, group: str, consumer: str) -> list[Entry]:
        """Everything delivered to this consumer name and not acknowledged: what a restart owes."""
        ...

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Mark entries as done; acknowledging twice is no error."""
        ...

    async def renew(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Have this consumer's entries count as delivered just now: slow work is no dead consumer."""
        ...

    async def give_back(self, stream: str, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """Have this consumer's entries delivered to any other as soon as it looks for stale ones.

        No delivery is counted. A consumer of the same name still finds them as its own.
        """
        ...

    async def dead_letters(self, stream: str, group: str) -> list[Entry]:
        """Entries that failed `max_deliveries` times."""
        ...

    async def depth(self, stream: str, group: str) -> Depth:
        """What the group has before it."""
        ...

    async def trim(self, stream: str) -> int:
        """Remove what every group has acknowledged; the number removed."""
        ...

    async def delete(self, stream: str) -> None:
        """Remove a stream with its groups and dead letters; one that is not there is no error."""
        ...

    async def ping(self) -> None:
        """Raise `QueueError` where the queue cannot be used."""
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...


def seal(message: Message, *, clock: Clock, traceparent: str = "", attempt: int = 1) -> Envelope:
    """A message in its envelope, compressed where it is large."""
    payload = message.SerializeToString()
    encoding = ""
    if len(payload) > COMPRESS_ABOVE_BYTES:
        payload = zstandard.ZstdCompressor(level=1).compress(payload)
        encoding = "zstd"
    if len(payload) > MAX_ENTRY_BYTES:
        raise QueueError(f"a message of {len(payload)} bytes passes the bound of {MAX_ENTRY_BYTES}")
    return Envelope(
        event_id=new_event_id(),
        type=message.DESCRIPTOR.full_name,
        created_at=timestamp_to_pb(clock.now()),
        attempt=attempt,
        traceparent=traceparent,
        payload=payload,
        encoding=encoding,
    )
