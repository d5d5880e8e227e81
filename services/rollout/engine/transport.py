"""HTTP/1.1 to an engine at a cost that does not grow with the number of open connections.

httpx's own pool looks at every connection for every request, which at a hundred requests in flight takes more
CPU time than the rest of this service. This transport keeps a list of idle connections a host and takes the
latest; it speaks plain HTTP with bodies by length or in chunks, which is what engines answer. One connection
carries one request at a time; one whose request failed or was cancelled is closed, never used again.
"""

import asyncio
from dataclasses import dataclass

import httpx

_MAX_HEAD_BYTES = 64 * 1024
_MAX_IDLE = 512


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_usable(self) -> bool:
        """False where the server closed it while it was idle."""
        return not self.reader.at_eof() and not self.writer.is_closing()


class _ClosedEarly(Exception):
    """The connection ended before a byte of the answer."""


class EngineTransport(httpx.AsyncBaseTransport):
    """A transport for `httpx.AsyncClient`; `http://` alone."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the whole answer. Raises httpx's errors, like any transport."""
        limits = request.extensions.get("timeout", {})
        body = await request.aread()
        try:
            async with asyncio.timeout(limits.get("read")):
                return await self._exchange(request, body)
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer in time", request=request) from error
        except (OSError, EOFError, _ClosedEarly) as error:
            raise httpx.ConnectError(str(error) or type(error).__name__, request=request) from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise httpx.RemoteProtocolError(f"unreadable answer: {error}", request=request) from error

    async def aclose(self) -> None:
        """Close every idle connection."""
        for connections in self._idle.values():
            for connection in connections:
                connection.writer.close()
        self._idle.clear()

    async def _exchange(self, request: httpx.Request, body: bytes) -> httpx.Response:
        host = (request.url.host, request.url.port or 80)
        while (connection := self._take_idle(host)) is not None:
            try:
                return await self._use(connection, host, request, body)
            except (_ClosedEarly, ConnectionError):
                continue  # the server closed an idle connection as it was taken; nothing was answered
        reader, writer = await asyncio.open_connection(*host, limit=_MAX_HEAD_BYTES)
        return await self._use(_Connection(reader, writer), host, request, body)

    def _take_idle(self, host: tuple[str, int]) -> _Connection | None:
        idle = self._idle.get(host, [])
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
            connection.writer.close()
        return None

    async def _use(
        self, connection: _Connection, host: tuple[str, int], request: httpx.Request, body: bytes
    ) -> httpx.Response:
        is_reusable = False
        try:
            connection.writer.write(_head(request) + body)
            await connection.writer.drain()
            status, headers = await _read_head(connection.reader)
            content = await _read_body(connection.reader, headers)
            is_reusable = headers.get("connection", "").lower() != "close"
        finally:
            idle = self._idle.setdefault(host, [])
            if is_reusable and len(idle) < _MAX_IDLE:
                idle.append(connection)
            else:
                connection.writer.close()
        return httpx.Response(status, headers=headers, content=content, request=request)


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % pair for pair in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        raise _ClosedEarly("the connection was closed") from error
    status_line, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{status_line[:80]!r} is no status line")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.pop("transfer-encoding", "").lower() == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            continue  # trailers
        return b"".join(parts)
    return await reader.readexactly(int(headers.get("content-length", "0")))
