"""Serving gRPC: health, reflection, who may call, deadlines and error mapping in one place."""

from __future__ import annotations  # the stubs subscript classes that are plain at run time

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from practicum.auth.keyring import Keyring
from practicum.auth.scopes import Scope
from practicum.errors import Forbidden, PracticumError, Unauthorized
from practicum.rpc.codes import MESSAGE_LIMITS, TOKEN_KEY, status_of, trailing_metadata
from practicum.rpc.drain import IntakeGate
from practicum.telemetry.logs import get_logger

log = get_logger("practicum.rpc")

# Health tells that a process lives; reflection tells what proto/ in the repository tells everyone.
_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")

Registration = Callable[[grpc.aio.Server], None]
# The stubs type handlers for the synchronous API; ours are coroutines and async generators.
Handler = Callable[[Any, Any], Any]


class RpcServer:
    """A running server; `port` is the one it was given."""

    def __init__(
        self,
        server: grpc.aio.Server,
        port: int,
        health_servicer: health.aio.HealthServicer,
        intake: IntakeGate,
    ) -> None:
        self.port = port
        self._server = server
        self._health = health_servicer
        self._intake = intake

    async def drain(self) -> None:
        """Say not serving and refuse what begins anew; who has something open here is answered on."""
        self._intake.close()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Say not serving, let calls in flight end within `grace_s`, then stop."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def start_server(
    registrations: Sequence[Registration],
    *,
    service_names: Sequence[str],
    address: str,
    token: str | Keyring,
    intake: Sequence[str] = (),
) -> RpcServer:
    """Serve at `address` ("host:port", port 0 for a free one); raises `OSError` where it is taken.

    `token` is a keyring, or the one secret that is accepted. `intake` names the methods
    ("/package.Service/Method") that begin something, refused while draining.
    """
    gate = IntakeGate(intake)
    server = grpc.aio.server(
        interceptors=[gate, _Guard(Keyring.of(token))], options=[*MESSAGE_LIMITS, ("grpc.so_reuseport", 0)]
    )
    for register in registrations:
        register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for name in ("", *service_names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen at {address}: {error}") from error
    await server.start()
    return RpcServer(server, port, health_servicer, gate)


class _Guard(grpc.aio.ServerInterceptor):
    """Lets in who may call the services, and turns our errors into a status with a code word."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata if key == TOKEN_KEY]
        try:
            caller = self._keyring.identify([_text(value) for value in shown])
            caller.require(Scope.INTERNAL)
        except (Unauthorized, Forbidden) as error:
            log.info("rpc.refused", method=method, code=error.code, reason=str(error))
            return _refusal(error)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guarded_unary(handler.unary_unary, method, caller.name),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guarded_stream(handler.unary_stream, method, caller.name),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        raise AssertionError(f"{method}: client streams are not part of practicum.v1")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _refusal(error: PracticumError) -> grpc.RpcMethodHandler[Any, Any]:
    """Whatever the method, a stream that is never read: a stranger's request takes no memory of ours."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status_of(error), str(error), trailing_metadata(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guarded_unary(behaviour: Handler, method: str, caller: str) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        with structlog.contextvars.bound_contextvars(caller=caller):
            try:
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001 — the edge answers every error
                await _abort(context, method, error)

    return call


def _guarded_stream(behaviour: Handler, method: str, caller: str) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        # Not undone at the end: a stream that is dropped is closed from another context than its own.
        structlog.contextvars.bind_contextvars(caller=caller)
        try:
            async for item in behaviour(request, context):
                yield item
        except Exception as error:  # noqa: BLE001 — the edge answers every error
            await _abort(context, method, error)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, PracticumError):
        await context.abort(status_of(error), str(error), trailing_metadata(error))
    log.error("rpc.failed", method=method, exc_info=error)
    # The text of an unforeseen error stays in our log: it may name what a caller must not see.
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the service's log")
