"""The service's end of a session: requests over the session's socket, answers checked before use."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from practicum.errors import SandboxError
from services.reward.sandbox.base import Changes, File, FileRefused, Ran, TestRecord, TestRun
from services.reward.sandbox.inside import frames

GRACE_S = 2.0  # the sandbox ends work at its limit; this much later the session counts as broken
FILE_S = 10.0
STATUSES = frozenset({"passed", "failed", "error", "skipped"})


class SessionChannel:
    """A session in a sandbox, as `base.Session`. Owns the socket; `end` is how the backend kills it."""

    def __init__(
        self,
        session_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._session_id = session_id
        self._reader = reader
        self._writer = writer
        self._end = end
        self._turn = asyncio.Lock()
        self._open = True
        self._closed = False

    @property
    def session_id(self) -> str:
        """The caller's id."""
        return self._session_id

    async def ready(self) -> None:
        """Waits until the sandbox is set up. Raises `SandboxError`."""
        header, _ = await self._answer(FILE_S)
        if not header.get("ready"):
            raise SandboxError(_text(header, "failed") or "the sandbox did not start")

    async def lay_out(self, files: Sequence[File], *, pristine: bool) -> None:
        """See `base.Session`."""
        entries = [(file.path, file.executable, pristine) for file in files]
        await self._ask({"op": "lay_out", "files": entries}, [file.content for file in files])

    async def read_file(self, path: str) -> str:
        """See `base.Session`."""
        header, _ = await self._ask({"op": "read", "path": path})
        return _text(header, "output")

    async def write_file(self, path: str, content: bytes) -> None:
        """See `base.Session`."""
        await self._ask({"op": "write", "path": path}, [content])

    async def edit_file(self, path: str, old: bytes, new: bytes) -> None:
        """See `base.Session`."""
        await self._ask({"op": "edit", "path": path}, [old, new])

    async def list_files(self) -> tuple[str, ...]:
        """See `base.Session`."""
        header, _ = await self._ask({"op": "list"})
        paths, num_paths = _texts(header, "paths"), header.get("num_paths")
        if isinstance(num_paths, int) and num_paths > len(paths):
            return (*paths, f"... and {num_paths - len(paths)} more")
        return paths

    async def run(self, argv: Sequence[str], *, wall_s: float) -> Ran:
        """See `base.Session`."""
        header, _ = await self._ask({"op": "run", "argv": list(argv), "wall_s": wall_s}, wall_s=wall_s)
        return _ran(header)

    async def run_python(self, code: str, *, wall_s: float) -> Ran:
        """See `base.Session`."""
        header, _ = await self._ask({"op": "python", "wall_s": wall_s}, [code.encode()], wall_s=wall_s)
        return _ran(header)

    async def run_tests(self, *, wall_s: float) -> TestRun:
        """See `base.Session`."""
        header, _ = await self._ask({"op": "run_tests", "wall_s": wall_s}, wall_s=wall_s)
        return _test_run(header)

    async def judge(
        self, paths: Sequence[str], *, functions: Mapping[str, Sequence[str]], wall_s: float
    ) -> TestRun:
        """See `base.Session`."""
        named = {module: list(names) for module, names in functions.items()}
        request = {"op": "judge", "paths": list(paths), "functions": named, "wall_s": wall_s}
        header, _ = await self._ask(request, wall_s=wall_s)
        return _test_run(header)

    async def serve_candidate(self, *, wall_s: float) -> Ran:
        """See `base.Session`."""
        header, _ = await self._ask({"op": "candidate", "wall_s": wall_s}, wall_s=wall_s)
        return _ran(header)

    async def snapshot(self) -> Changes:
        """See `base.Session`."""
        header, blobs = await self._ask({"op": "snapshot"})
        named = header.get("changed")
        if not isinstance(named, list) or len(named) != len(blobs):
            raise SandboxError("a snapshot names other files than it carries")
        changed = tuple(
            File(path=str(path), content=content, executable=bool(executable))
            for (path, executable), content in zip(named, blobs, strict=True)
        )
        return Changes(changed=changed, removed=_texts(header, "removed"), refused=_texts(header, "refused"))

    async def close(self) -> None:
        """See `base.Session`."""
        self._open = False
        self._closed = True
        self._writer.close()
        try:
            await self._end()
        finally:
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    async def _ask(
        self, header: frames.Header, blobs: Sequence[bytes] = (), *, wall_s: float = 0.0
    ) -> frames.Frame:
        async with self._turn:
            if not self._open:
                raise SandboxError(f"session {self._session_id} is closed")
            request = frames.pack(header, blobs)
            self._open = (
                False  # until the answer is here: a caller that gives up leaves the channel out of step
            )
            try:
                self._writer.write(request)
                await self._writer.drain()
            except OSError as error:
                raise SandboxError(f"session {self._session_id} has ended") from error
            answer = await self._answer((wall_s or FILE_S) + GRACE_S)
            self._open = not self._closed
        if isinstance(answer[0].get("refused"), str):
            raise FileRefused(_text(answer[0], "refused"))
        return answer

    async def _answer(self, timeout_s: float) -> frames.Frame:
        try:
            async with asyncio.timeout(timeout_s):
                prefix = await self._reader.readexactly(frames.PREFIX.size)
                size_bytes, header_bytes = frames.sizes(prefix)
                return frames.parse(await self._reader.readexactly(size_bytes), header_bytes)
        except TimeoutError:
            raise SandboxError(f"session {self._session_id} gave no answer in {timeout_s:.1f} s") from None
        except (asyncio.IncompleteReadError, OSError, frames.FrameError) as error:
            raise SandboxError(f"session {self._session_id} broke off ({type(error).__name__})") from error


async def open_channel(
    session_id: str, ours: socket.socket, end: Callable[[], Awaitable[None]]
) -> SessionChannel:
    """A channel over a connected socket."""
    reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
    return SessionChannel(session_id, reader, writer, end)


def _text(header: frames.Header, name: str) -> str:
    """A text field; lone surrogates, which protobuf refuses, are escaped."""
    return str(header.get(name) or "").encode("utf-8", "backslashreplace").decode()


def _texts(header: frames.Header, name: str) -> tuple[str, ...]:
    values = header.get(name)
    if not isinstance(values, list):
        return ()
    return tuple(str(value).encode("utf-8", "backslashreplace").decode() for value in values)


def _ran(header: frames.Header) -> Ran:
    status, seconds = header.get("exit_status"), header.get("seconds")
    return Ran(
        exit_status=status if isinstance(status, int) else None,
        limit_hit=_text(header, "limit_hit"),
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        output=_text(header, "output"),
        cut=bool(header.get("cut")),
    )


def _test_run(header: frames.Header) -> TestRun:
    collected: tuple[str, ...] = ()
    ended: bool | None = None
    unsupported = ""
    records = []
    raw_records: Any = header.get("records")
    for raw in raw_records if isinstance(raw_records, list) else ():
        if not isinstance(raw, dict):
            continue
        if "collected" in raw:
            collected = _texts(raw, "collected")
        elif "end" in raw:
            ended = raw["end"] is True
        elif "unsupported" in raw:
            unsupported = _text(raw, "unsupported")
        elif raw.get("status") in STATUSES:
            records.append(_record(raw))
    num_files = header.get("files")
    return TestRun(
        ran=_ran(header),
        num_files=num_files if isinstance(num_files, int) else 0,
        collected=collected,
        records=tuple(records),
        ended=ended,
        unsupported=unsupported,
    )


def _record(raw: dict[str, Any]) -> TestRecord:
    seconds = raw.get("seconds")
    return TestRecord(
        test_id=_text(raw, "id"),
        status=_text(raw, "status"),
        message=_text(raw, "message")[:400],
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
    )
