"""Calling gRPC: every call has a deadline and a token, and fails with one of our errors."""

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import grpc

from practicum.auth.keyring import Keyring
from practicum.rpc.codes import MESSAGE_LIMITS, TOKEN_KEY, RpcUnavailable, error_from

__all__ = ["RpcUnavailable", "call", "connect"]

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)


class _Method(Protocol[Request, Response]):
    def __call__(self, request: Request, *, timeout: float | None = ...) -> Awaitable[Response]: ...


def connect(address: str, *, token: str | Keyring) -> grpc.aio.Channel:
    """A channel to `address` ("host:port") that shows `token` on every call; close it when done.

    A keyring's secret is asked for at each call, so that a new one needs no new channel.
    """
    keyring = Keyring.of(token)
    return grpc.aio.insecure_channel(
        address,
        options=[*MESSAGE_LIMITS, ("grpc.max_reconnect_backoff_ms", 2000)],
        interceptors=[_ShowTokenOnCalls(keyring), _ShowTokenOnStreams(keyring)],
    )


async def call(method: _Method[Request, Response], request: Request, *, timeout_s: float) -> Response:
    """Await one unary call; raises the `PracticumError` that the other side named."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from error


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (TOKEN_KEY, f"Bearer {token}"))
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=metadata,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )


# grpc.aio registers an interceptor for the first kind of call it matches, so each kind has its own.
class _ShowTokenOnCalls(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._keyring.shown()), request)


class _ShowTokenOnStreams(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._keyring.shown()), request)
