"""Sandboxes, tool schemas and admission, asked of the reward service over gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
import structlog

from practicum.clock import Clock
from practicum.errors import GraderError, NotFound, Overloaded, PracticumError, SandboxError
from practicum.rpc.client import call
from practicum.rpc.codes import RpcUnavailable
from practicum.telemetry.logs import get_logger
from practicum.v1 import reward_pb2 as pb
from practicum.v1.reward_pb2_grpc import GradingServiceStub, SandboxServiceStub
from services.rollout.chat import ToolSchema
from services.rollout.episode.sandbox import Sandbox, ToolAnswer
from services.rollout.tasks import Task

log: structlog.stdlib.BoundLogger = get_logger("rollout.sandboxes")

T = TypeVar("T")

_OPEN_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 10.0
_LIST_DEADLINE_S = 10.0
_AWAY_WAIT_S = 0.5
PATIENCE_S = 120.0  # how long a full or absent reward service is waited for


class RemoteSandboxes:
    """The `Sandboxes` of episodes, at the reward service.

    A service without a free slot, or one that restarts, is waited for, up to `patience_s`: that is
    back-pressure, no failure. `session_wall_s` is how long the longest attempt may last: the policy's own
    wall time is counted by the episode loop, without its waits, which a sandbox cannot tell apart.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        clock: Clock,
        call_deadline_s: float,
        session_wall_s: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._stub = SandboxServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._clock = clock
        self._call_deadline_s = call_deadline_s
        self._session_wall_s = session_wall_s
        self._patience_s = patience_s

    @asynccontextmanager
    async def open(self, session_id: str, task: Task) -> AsyncIterator[Sandbox]:
        """A sandbox with the task's workspace, closed on leaving."""
        spec = pb.TaskSpec.FromString(task.spec)
        request = pb.OpenRequest(
            session_id=session_id,
            task_id=task.task_id,
            workspace=spec.workspace,
            tools=task.tools,
            limits=spec.limits,
        )
        request.limits.session_wall_s = self._session_wall_s
        try:
            await _awaited(
                lambda: call(self._stub.Open, request, timeout_s=_OPEN_DEADLINE_S),
                self._clock,
                self._patience_s,
            )
        except asyncio.CancelledError:
            await self._close(session_id)  # it may have been made all the same
            raise
        try:
            yield _RemoteSandbox(self._stub, session_id, self._call_deadline_s)
        finally:
            await self._close(session_id)

    async def _close(self, session_id: str) -> None:
        # The reward service ends sessions by their wall time too, so a lost close leaks nothing for long.
        try:
            request = pb.CloseRequest(session_id=session_id)
            await call(self._stub.Close, request, timeout_s=_CLOSE_DEADLINE_S)
        except PracticumError as error:
            log.warning("sandbox.close_failed", session_id=session_id, error=str(error))


class _RemoteSandbox:
    def __init__(self, stub: SandboxServiceStub, session_id: str, call_deadline_s: float) -> None:
        self._stub = stub
        self._session_id = session_id
        self._call_deadline_s = call_deadline_s

    async def call_tool(self, call_id: str, name: str, arguments_json: str) -> ToolAnswer:
        request = pb.CallToolRequest(
            session_id=self._session_id, call_id=call_id, name=name, arguments_json=arguments_json
        )
        try:
            answer = await call(self._stub.CallTool, request, timeout_s=self._call_deadline_s)
        except NotFound as error:
            raise SandboxError(f"the session is gone: {error}") from error
        return ToolAnswer(
            output=answer.output,
            is_error=answer.is_error,
            ends_episode=answer.ends_episode,
            limit_hit=answer.limit_hit,
            seconds=answer.seconds,
        )

    async def snapshot(self) -> bytes:
        request = pb.SnapshotRequest(session_id=self._session_id)
        diff = await call(self._stub.Snapshot, request, timeout_s=self._call_deadline_s)
        return bytes(diff.SerializeToString())


async def _awaited(ask: Callable[[], Awaitable[T]], clock: Clock, patience_s: float) -> T:
    """The answer to a question that may be asked twice; asked again while the service is full or away."""
    give_up_at_s = clock.monotonic() + patience_s
    while True:
        try:
            return await ask()
        except (Overloaded, RpcUnavailable) as error:
            wait_s = error.retry_after_s if isinstance(error, Overloaded) else _AWAY_WAIT_S
            if clock.monotonic() + wait_s > give_up_at_s:
                raise
        await clock.sleep(wait_s)


class ToolCatalogue:
    """The tools that sandboxes offer, asked for once."""

    def __init__(self, channel: grpc.aio.Channel, *, clock: Clock, patience_s: float = PATIENCE_S) -> None:
        self._stub = SandboxServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._clock = clock
        self._patience_s = patience_s
        self._tools: Mapping[str, ToolSchema] | None = None  # None = not asked yet

    async def tools(self) -> Mapping[str, ToolSchema]:
        """Schemas by name; raises `RpcUnavailable` while the reward service cannot be reached."""
        if self._tools is None:
            answer = await call(self._stub.ListTools, pb.ListToolsRequest(), timeout_s=_LIST_DEADLINE_S)
            self._tools = {tool.name: _schema(tool) for tool in answer.tools}
        return self._tools

    async def awaited_tools(self) -> Mapping[str, ToolSchema]:
        """The same for whoever can wait: raises only where the service stays away."""
        return await _awaited(self.tools, self._clock, self._patience_s)


def _schema(tool: pb.ToolSpec) -> ToolSchema:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(tool.parameters_json or "{}"),
    }
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the reward service says about a task."""

    admitted: bool
    reasons: tuple[dict[str, object], ...]  # {"name", "ok", "detail"} in the order of the checks


_NUM_ADMISSION_GRADINGS = 4  # twice as given, twice with the reference


class Admissions:
    """Asks whether a task is fit to be trained on. The deadline leaves the hidden tests their own time."""

    def __init__(self, channel: grpc.aio.Channel, *, deadline_s: float = 120.0) -> None:
        self._stub = GradingServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._deadline_s = deadline_s

    async def admit(self, task: Task) -> Verdict:
        """The verdict; raises `PracticumError` where the platform failed.

        `GraderError` where this task got no answer in time, `RpcUnavailable` where no task would get one.
        """
        request = pb.AdmitRequest(task=pb.TaskSpec.FromString(task.spec))
        deadline_s = self._deadline_s + _NUM_ADMISSION_GRADINGS * request.task.grader.timeout_s
        if task.reference is not None:
            request.reference.ParseFromString(task.reference)
        try:
            answer = await call(self._stub.Admit, request, timeout_s=deadline_s)
        except RpcUnavailable as error:
            cause = error.__cause__
            if isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise GraderError(f"no verdict within {deadline_s:g} s") from error
            raise
        reasons = tuple(
            {"name": check.name, "ok": check.ok, "detail": check.detail} for check in answer.checks
        )
        return Verdict(admitted=answer.admitted, reasons=reasons)
