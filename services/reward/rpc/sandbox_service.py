"""SandboxService: one sandbox per episode."""

import json
from typing import Any

from practicum.errors import InvalidInput
from practicum.v1 import reward_pb2 as pb
from practicum.v1 import reward_pb2_grpc
from services.reward.metrics import RewardMetrics
from services.reward.rpc.convert import changes_to_pb, files_from_pb
from services.reward.sandbox.limits import SandboxLimits, limits_from
from services.reward.sessions.registry import OpenSpec, SessionRegistry
from services.reward.tools.schemas import SCHEMAS, TOOLS


class SandboxServicer(reward_pb2_grpc.SandboxServiceServicer):
    """See proto/practicum/v1/reward.proto."""

    def __init__(
        self,
        sessions: SessionRegistry,
        defaults: SandboxLimits,
        backend: str,
        metrics: RewardMetrics,
        advertised: str = "",
    ) -> None:
        self._sessions = sessions
        self._defaults = defaults
        self._backend = backend
        self._metrics = metrics
        self._advertised = advertised

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        """Lays out a workspace in a new sandbox."""
        if not request.session_id:
            raise InvalidInput("session_id", "is empty")
        unknown = [name for name in request.tools if name not in SCHEMAS]
        if unknown:
            raise InvalidInput("tools", f"no tool {unknown[0]!r}; there are {', '.join(SCHEMAS)}")
        spec = OpenSpec(
            task_id=request.task_id,
            files=files_from_pb(request.workspace, "workspace"),
            tools=tuple(request.tools),
            limits=limits_from(request.limits, self._defaults),
        )
        await self._sessions.open(request.session_id, spec)
        return pb.OpenResponse(session_id=request.session_id, backend=self._backend, address=self._advertised)

    async def CallTool(self, request: pb.CallToolRequest, context: Any) -> pb.CallToolResponse:
        """Runs one tool call."""
        result = await self._sessions.call(
            request.session_id, request.call_id, request.name, request.arguments_json
        )
        tool = request.name if request.name in SCHEMAS else "unknown"
        self._metrics.tool_calls.labels(tool=tool, limit=result.limit_hit).inc()
        return pb.CallToolResponse(
            output=result.output,
            is_error=result.is_error,
            ends_episode=result.ends_episode,
            limit_hit=result.limit_hit,
            seconds=result.seconds,
        )

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.WorkspaceDiff:
        """Reports what changed."""
        return changes_to_pb(await self._sessions.snapshot(request.session_id))

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        """Ends the session."""
        await self._sessions.close(request.session_id)
        return pb.CloseResponse()

    async def ListTools(self, request: pb.ListToolsRequest, context: Any) -> pb.ListToolsResponse:
        """The tools and their schemas."""
        return pb.ListToolsResponse(
            tools=[
                pb.ToolSpec(
                    name=tool.name.value,
                    description=tool.description,
                    parameters_json=json.dumps(tool.parameters()),
                )
                for tool in TOOLS
            ]
        )
