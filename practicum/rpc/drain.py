"""What a gRPC edge answers while its service drains.

Calls that begin something new are refused with UNAVAILABLE, which sends a caller to another replica or
has it ask again; calls on what is open here are answered until the end.
"""

from __future__ import annotations  # the stubs subscript classes that are plain at run time

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc


class IntakeGate(grpc.aio.ServerInterceptor):
    """Refuses `methods` ("/package.Service/Method", unary ones) once it is closed."""

    def __init__(self, methods: Collection[str]) -> None:
        self._methods = frozenset(methods)
        self._is_closed = False

    def close(self) -> None:
        """Refuse from now on."""
        self._is_closed = True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let a call through, or answer it here."""
        if self._is_closed and handler_call_details.method in self._methods:
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "draining: the service stops; ask another, or again")
