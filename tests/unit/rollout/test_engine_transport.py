"""The transport to engines, against real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from services.rollout.engine.transport import EngineTransport

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n" + b'{"ok":  1}'


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    size = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
    return head + await reader.readexactly(size)


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[tuple[httpx.AsyncClient, list[int]]]:
    """A client at a server of one's own; the list grows with each connection."""
    connections: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with httpx.AsyncClient(transport=EngineTransport(), base_url=f"http://127.0.0.1:{port}") as client:
        try:
            yield client, connections
        finally:
            listening.close()
            await listening.wait_closed()


async def test_requests_when_one_after_the_other_share_a_connection() -> None:
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(ANSWER)

    async with server(talk) as (client, connections):
        for _ in range(3):
            answer = await client.post("/generate?x=1", json={"a": "é"})
            assert answer.json() == {"ok": 1}
        assert len(connections) == 1
        assert seen[0].startswith(b"POST /generate?x=1 HTTP/1.1\r\nHost: 127.0.0.1")
        assert seen[0].endswith('{"a":"é"}'.encode())


async def test_requests_when_at_once_have_a_connection_each() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await asyncio.sleep(0.05)
            writer.write(ANSWER)

    async with server(talk) as (client, connections):
        answers = await asyncio.gather(*(client.get("/x") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert len(connections) == 20
        await asyncio.gather(*(client.get("/x") for _ in range(20)))
        assert len(connections) == 20


async def test_answer_when_in_chunks_is_joined() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"3\r\nabc\r\n")
            await asyncio.sleep(0)
            writer.write(b"A;x=y\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n")

    async with server(talk) as (client, connections):
        for _ in range(2):
            answer = await client.get("/x")
            assert (answer.status_code, answer.text) == (400, "abc0123456789")
        assert len(connections) == 1


async def test_request_when_the_idle_connection_was_closed_uses_another() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ANSWER)  # then the connection is closed, without a word about it

    async with server(talk) as (client, connections):
        for _ in range(3):
            assert (await client.get("/x")).status_code == 200
        assert len(connections) == 3


async def test_request_when_cancelled_leaves_no_connection_with_an_answer_in_it() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            if b"/slow" in request:
                await asyncio.sleep(0.2)
            writer.write(ANSWER.replace(b"ok", request.split(b" ")[1][1:3]))

    async with server(talk) as (client, connections):
        slow = asyncio.ensure_future(client.get("/slow"))
        await asyncio.sleep(0.05)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await client.get("/xy")).json() == {"xy": 1}
        assert len(connections) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.ConnectError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123", httpx.ConnectError),
        (b"SSH-2.0-x\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", httpx.RemoteProtocolError),
    ],
)
async def test_answer_when_broken_is_a_transport_error(answer: bytes, error: type[Exception]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    async with server(talk) as (client, _):
        with pytest.raises(error):
            await client.get("/x")


async def test_request_when_nobody_answers_in_time_or_listens_fails() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)

    async with server(talk) as (client, _):
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/x", timeout=0.05)
    async with httpx.AsyncClient(transport=EngineTransport()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1/x")
