"""The open sessions of this process: idempotent, bounded, and ended when their time is up.

Opening a session twice gives the same one; repeating a call gives its stored answer without running it
again. A session ends on close, at its wall limit, or when nobody used it for a while.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Gauge

from practicum.clock import Clock
from practicum.errors import Conflict, InvalidInput, NotFound, Overloaded, SandboxError
from practicum.ids import new_id
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from services.reward.sandbox.base import Changes, File, FileRefused, Sandbox, Session
from services.reward.sandbox.limits import SandboxLimits
from services.reward.tools.calls import ToolResult, call_tool

MAX_STORED_CALLS = 1000

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSpec:
    """What a session was opened with; a repeated open must say the same."""

    task_id: str
    files: tuple[File, ...]
    tools: tuple[str, ...]
    limits: SandboxLimits


@dataclass(slots=True)
class _Held:
    spec: OpenSpec
    opened_s: float
    used_s: float
    session: Session | None = None  # None = still being made
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: dict[str, asyncio.Task[ToolResult]] = field(default_factory=dict)
    num_running: int = 0


class SessionRegistry:
    """Owns every episode's session."""

    def __init__(
        self, sandbox: Sandbox, clock: Clock, *, max_sessions: int, idle_timeout_s: float, gauge: Gauge
    ) -> None:
        self._sandbox = sandbox
        self._clock = clock
        self._max_sessions = max_sessions
        self._idle_timeout_s = idle_timeout_s
        self._gauge = gauge
        self._held: dict[str, _Held] = {}
        self._forgotten = asyncio.Event()  # set when a session ended

    @property
    def num_open(self) -> int:
        """Sessions that exist or are being made."""
        return len(self._held)

    async def open(self, session_id: str, spec: OpenSpec) -> None:
        """Makes a session with its workspace; a repeat waits for the first and makes none.

        Raises `Overloaded` at the bound, `Conflict` where the id is in use with another task, `SandboxError`.
        """
        held = self._held.get(session_id)
        if held is not None:
            if held.spec != spec:
                raise Conflict(f"session {session_id} is open with another workspace, other tools or limits")
            await held.ready.wait()
            if held.session is None:
                raise SandboxError(f"session {session_id} could not be made")
            return
        if len(self._held) >= self._max_sessions:
            raise Overloaded(f"{self._max_sessions} sandbox sessions are open", retry_after_s=1.0)
        now_s = self._clock.monotonic()
        held = self._held[session_id] = _Held(spec=spec, opened_s=now_s, used_s=now_s)
        self._gauge.set(len(self._held))
        try:
            session = await self._sandbox.open(session_id, spec.limits)
            try:
                await session.lay_out(spec.files, pristine=True)
            except FileRefused as error:
                await session.close()
                raise InvalidInput("workspace", str(error)) from error
            except BaseException:
                await session.close()
                raise
            held.session = session
        except BaseException:
            self._forget(session_id, held)
            raise
        finally:
            held.ready.set()

    async def call(self, session_id: str, call_id: str, name: str, arguments_json: str) -> ToolResult:
        """Runs one tool call, or gives the answer that this `call_id` had or will have.

        A caller that gives up does not stop the call: its retry finds it. Raises `NotFound` where there is no
        such session, `SandboxError` where it broke.
        """
        held = await self._find(session_id)
        call_id = call_id or new_id("call")
        task = held.calls.get(call_id)
        if task is None:
            self._alive(session_id, held)
            work = self._call(session_id, held, name, arguments_json)
            task = held.calls[call_id] = asyncio.create_task(work)
            task.add_done_callback(_retrieve)
            _forget_oldest(held.calls)
        return await asyncio.shield(task)

    async def snapshot(self, session_id: str) -> Changes:
        """What changed in the session's workspace. Raises `NotFound`, `SandboxError`."""
        held = await self._find(session_id)
        self._alive(session_id, held)
        task = asyncio.create_task(self._snapshot(session_id, held))
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _call(self, session_id: str, held: _Held, name: str, arguments_json: str) -> ToolResult:
        async with held.turn:
            session = self._alive(session_id, held)
            held.num_running += 1
            limits = held.spec.limits
            try:
                return await call_tool(
                    session, held.spec.tools, name, arguments_json, wall_s=limits.call_wall_s
                )
            except SandboxError:
                await self._end(session_id, held)
                raise
            finally:
                held.num_running -= 1
                held.used_s = self._clock.monotonic()

    async def _snapshot(self, session_id: str, held: _Held) -> Changes:
        async with held.turn:
            held.used_s = self._clock.monotonic()
            try:
                return await self._alive(session_id, held).snapshot()
            except SandboxError:
                await self._end(session_id, held)
                raise

    async def close(self, session_id: str) -> None:
        """Ends a session; one that is gone is no error."""
        held = self._held.get(session_id)
        if held is not None:
            await held.ready.wait()
            await self._end(session_id, held)

    async def reap(self, stop: asyncio.Event, *, every_s: float = 1.0) -> None:
        """Ends sessions that are too old or idle. Told to stop, it returns once none is open."""
        while not stop.is_set():
            await self._end_overdue()
            await pause(stop, every_s)
        while self._held:
            await self._end_overdue()
            self._forgotten.clear()
            await pause(self._forgotten, every_s)

    async def _end_overdue(self) -> None:
        for session_id, reason in self.overdue():
            _log.warning("session.reaped", session_id=session_id, reason=reason)
            await self.close(session_id)

    def overdue(self) -> Sequence[tuple[str, str]]:
        """Sessions whose time is up, with the reason."""
        now_s = self._clock.monotonic()
        found = []
        for session_id, held in self._held.items():
            if held.session is None:
                continue
            if now_s - held.opened_s > held.spec.limits.session_wall_s:
                found.append((session_id, "wall"))
            elif held.num_running == 0 and now_s - held.used_s > self._idle_timeout_s:
                found.append((session_id, "idle"))
        return found

    async def close_all(self) -> None:
        """Ends every session."""
        for session_id in list(self._held):
            await self.close(session_id)

    async def _find(self, session_id: str) -> _Held:
        held = self._held.get(session_id)
        if held is None:
            raise NotFound(f"no open session {session_id}")
        await held.ready.wait()
        return held

    def _alive(self, session_id: str, held: _Held) -> Session:
        if held.session is None or self._held.get(session_id) is not held:
            raise NotFound(f"no open session {session_id}")
        return held.session

    async def _end(self, session_id: str, held: _Held) -> None:
        session = held.session
        self._forget(session_id, held)
        if session is None:
            return
        held.session = None
        try:
            await session.close()
        except SandboxError as error:
            _log.error("session.not_ended", session_id=session_id, error=str(error))

    def _forget(self, session_id: str, held: _Held) -> None:
        if self._held.get(session_id) is held:
            del self._held[session_id]
            self._forgotten.set()
        self._gauge.set(len(self._held))


def _retrieve(task: "asyncio.Task[Any]") -> None:
    # its caller may be gone; an error that nobody asks for is not worth a warning
    if not task.cancelled():
        task.exception()


def _forget_oldest(calls: dict[str, "asyncio.Task[ToolResult]"]) -> None:
    if len(calls) > MAX_STORED_CALLS:
        oldest = next(iter(calls))
        if calls[oldest].done():
            del calls[oldest]
