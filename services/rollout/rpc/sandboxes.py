"""Sandboxes, tool schemas and admission, asked of the reward service over gRPC."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import structlog

from practicum.clock import Clock
from practicum.errors import NotFound, Overloaded, PracticumError, SandboxError
from practicum.rpc.client import call
from practicum.telemetry.logs import get_logger
from practicum.v1 import reward_pb2 as pb
from practicum.v1.reward_pb2_grpc import GradingServiceStub, SandboxServiceStub
from services.rollout.chat import ToolSchema
from services.rollout.episode.sandbox import Sandbox, ToolAnswer
from services.rollout.tasks import Task

log: structlog.stdlib.BoundLogger = get_logger("rollout.sandboxes")

_OPEN_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 10.0


class RemoteSandboxes:
    """The `Sandboxes` of episodes, at the reward service.

    A service without a free slot is waited for, up to `full_wait_s`: that is back-pressure, no failure.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, clock: Clock, call_deadline_s: float, full_wait_s: float = 120.0
    ) -> None:
        self._stub = SandboxServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._clock = clock
        self._call_deadline_s = call_deadline_s
        self._full_wait_s = full_wait_s

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
        await self._open(request)
        try:
            yield _RemoteSandbox(self._stub, session_id, self._call_deadline_s)
        finally:
            await self._close(session_id)

    async def _open(self, request: pb.OpenRequest) -> None:
        give_up_at_s = self._clock.monotonic() + self._full_wait_s
        while True:
            try:
                await call(self._stub.Open, request, timeout_s=_OPEN_DEADLINE_S)
                return
            except Overloaded as error:
                if self._clock.monotonic() + error.retry_after_s > give_up_at_s:
                    raise
                await self._clock.sleep(error.retry_after_s)

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


class ToolCatalogue:
    """The tools that sandboxes offer, asked for once."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = SandboxServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._tools: Mapping[str, ToolSchema] | None = None  # None = not asked yet

    async def tools(self) -> Mapping[str, ToolSchema]:
        """Schemas by name; raises `RpcUnavailable` while the reward service cannot be reached."""
        if self._tools is None:
            answer = await call(self._stub.ListTools, pb.ListToolsRequest(), timeout_s=10.0)
            self._tools = {tool.name: _schema(tool) for tool in answer.tools}
        return self._tools


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


class Admissions:
    """Asks whether a task is fit to be trained on."""

    def __init__(self, channel: grpc.aio.Channel, *, deadline_s: float = 120.0) -> None:
        self._stub = GradingServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        self._deadline_s = deadline_s

    async def admit(self, task: Task) -> Verdict:
        """The verdict; raises `PracticumError` where the platform failed."""
        request = pb.AdmitRequest(task=pb.TaskSpec.FromString(task.spec))
        if task.reference is not None:
            request.reference.ParseFromString(task.reference)
        answer = await call(self._stub.Admit, request, timeout_s=self._deadline_s)
        reasons = tuple(
            {"name": check.name, "ok": check.ok, "detail": check.detail} for check in answer.checks
        )
        return Verdict(admitted=answer.admitted, reasons=reasons)
