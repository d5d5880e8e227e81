"""Length-prefixed frames: a JSON header and raw blobs, over a stream socket.

A frame is `!II` (bytes that follow, bytes of header), the header, then the blobs in the order of the
header's `blobs` lengths. Sizes are bounded before anything is allocated, because either end may be lying.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

PREFIX = struct.Struct("!II")
MAX_FRAME_BYTES = 64 * 1024 * 1024

Header = dict[str, Any]
Frame = tuple[Header, list[bytes]]


class FrameError(Exception):
    """The other end sent something that is no frame, or too much of it."""


def pack(header: Header, blobs: Sequence[bytes] = ()) -> bytes:
    """One frame as bytes. Raises `FrameError` above `MAX_FRAME_BYTES`."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode("ascii")
    size_bytes = len(text) + sum(map(len, blobs))
    if size_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {size_bytes} bytes is above the bound of {MAX_FRAME_BYTES}")
    return b"".join((PREFIX.pack(size_bytes, len(text)), text, *blobs))


def sizes(prefix: bytes, max_bytes: int = MAX_FRAME_BYTES) -> tuple[int, int]:
    """Bytes after the prefix, and bytes of header. Raises `FrameError` where they make no sense."""
    size_bytes, header_bytes = PREFIX.unpack(prefix)
    if size_bytes > max_bytes or header_bytes > size_bytes:
        raise FrameError(f"a frame announces {size_bytes} bytes, {header_bytes} of them header")
    return size_bytes, header_bytes


def parse(body: bytes, header_bytes: int) -> Frame:
    """Header and blobs of a body. Raises `FrameError` where the body is malformed."""
    try:
        header = json.loads(body[:header_bytes])
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is no JSON") from error
    lengths = header.get("blobs") if isinstance(header, dict) else None
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise FrameError("a frame's header names no blobs")
    if header_bytes + sum(lengths) != len(body):
        raise FrameError("a frame's blobs do not add up to its size")
    blobs, position = [], header_bytes
    for length in lengths:
        blobs.append(body[position : position + length])
        position += length
    return header, blobs


def send(channel: socket.socket, header: Header, blobs: Sequence[bytes] = ()) -> None:
    """Sends one frame; blocks until the other end took it."""
    channel.sendall(pack(header, blobs))


def receive(channel: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> Frame | None:
    """The next frame; None where the other end closed."""
    prefix = _exactly(channel, PREFIX.size)
    if prefix is None:
        return None
    size_bytes, header_bytes = sizes(prefix, max_bytes)
    body = _exactly(channel, size_bytes)
    return None if body is None else parse(body, header_bytes)


def _exactly(channel: socket.socket, size_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size_bytes:
        try:
            part = channel.recv(min(size_bytes - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
