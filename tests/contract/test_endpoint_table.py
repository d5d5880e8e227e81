"""docs/endpoints.md against the services, both ways: every route has its row and every row its route.

Then every endpoint is called: what a row says of who may call it is so, and nobody else gets as far as
the handler. There is next to nothing behind the handlers here, so reaching one is an error of its own.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from practicum.auth.entries import sha256_of
from practicum.auth.keyring import Keyring
from practicum.auth.scopes import Scope
from practicum.clock import SystemClock
from practicum.rest.access import ScopedRoute
from practicum.rpc.server import start_server
from practicum.v1 import (
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from tests.fixtures.endpoint_table import Endpoint, operation_rows, operations_of, rest_table, table
from tests.fixtures.service_apps import OWN_SECRET, SERVICES, service_app

CONTRACTS: dict[str, tuple[FileDescriptor, ModuleType]] = {
    "reward": (reward_pb2.DESCRIPTOR, reward_pb2_grpc),
    "rollout": (rollout_pb2.DESCRIPTOR, rollout_pb2_grpc),
    "trainer": (trainer_pb2.DESCRIPTOR, trainer_pb2_grpc),
}
OPEN_CONTRACTS: tuple[Any, ...] = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the handlers raise here is expected, and slow to print."""
    with capture_logs():
        yield


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    """A token for every scope, whose secret is the scope's name."""
    path = tmp_path / "tokens.json"
    tokens = [{"name": f"has-{scope}", "scopes": [str(scope)], "sha256": sha256_of(scope)} for scope in Scope]
    path.write_text(json.dumps({"tokens": tokens}))
    return path


@pytest.fixture(params=SERVICES)
async def served(
    request: pytest.FixtureRequest, tmp_path: Path, tokens_file: Path
) -> AsyncIterator[tuple[str, FastAPI]]:
    """Each service in turn, by name."""
    async with service_app(request.param, tmp_path, tokens_file=tokens_file) as app:
        yield request.param, app


def routes_of(service: str, app: FastAPI) -> Iterator[Endpoint]:
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        scope = str(route.needed_scope) if isinstance(route, ScopedRoute) else "none"
        for method in (context.methods or set()) - {"HEAD"}:
            yield Endpoint(service, method, str(context.path), scope)


def methods_of(file: FileDescriptor) -> list[str]:
    return [
        f"{service.full_name}/{method.name}"
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def test_table_when_read_has_no_row_twice() -> None:
    rows = [(row.service, row.method, row.path) for row in table()]
    assert rows
    assert sorted(rows) == sorted(set(rows))


async def test_routes_when_walked_are_the_rows_with_their_scopes(served: tuple[str, FastAPI]) -> None:
    service, app = served
    assert sorted(routes_of(service, app)) == rest_table(service)


async def test_openapi_when_read_shows_the_scopes_of_the_rows(served: tuple[str, FastAPI]) -> None:
    service, app = served
    assert sorted(operations_of(service, app.openapi())) == operation_rows(service)


def test_grpc_methods_when_walked_are_the_rows_with_their_scopes() -> None:
    found = [
        Endpoint(service, "gRPC", method, "internal")
        for service, (file, _) in CONTRACTS.items()
        for method in methods_of(file)
    ]
    found += [
        Endpoint(service, "gRPC", method, "none")
        for service in SERVICES
        for file in OPEN_CONTRACTS
        for method in methods_of(file)
    ]
    assert sorted(found) == sorted(row for row in table() if row.method == "gRPC")


async def test_rest_when_called_lets_in_whom_the_row_says_and_nobody_else(
    served: tuple[str, FastAPI],
) -> None:
    service, app = served
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:

        async def ask(row: Endpoint, secret: str | None) -> httpx.Response:
            headers = {"Content-Type": "application/json"}
            if secret is not None:
                headers["Authorization"] = f"Bearer {secret}"
            # No JSON: whoever gets past the door is told so, and whoever does not learns nothing.
            return await client.request(row.method, row.path, headers=headers, content=b"{")

        for row in rest_table(service):
            if row.scope == "none":
                assert (await ask(row, None)).status_code in (200, 503), row
                continue
            for secret in (None, "nobody"):
                refused = await ask(row, secret)
                assert refused.status_code == 401, (row, secret)
                assert refused.json()["code"] == "unauthorized"
                assert refused.headers["WWW-Authenticate"] == "Bearer"
            for scope in Scope:
                answer = await ask(row, scope)
                if scope.includes(Scope(row.scope)):
                    assert answer.status_code not in (401, 403), (row, scope)
                    continue
                assert answer.status_code == 403, (row, scope)
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] == "forbidden"
                assert f"the scope '{row.scope}'" in answer.json()["detail"]


@pytest.mark.parametrize("service", ["reward", "trainer"])
async def test_rest_when_the_caller_is_refused_never_reaches_the_handler(
    tmp_path: Path, tokens_file: Path, service: str
) -> None:
    # These services have nothing behind their handlers, so one that runs without a body to read fails.
    async with service_app(service, tmp_path, tokens_file=tokens_file) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        reached = set()
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            for row in rest_table(service):
                for secret in ("nobody", *Scope):
                    headers = {"Authorization": f"Bearer {secret}"}
                    answer = await client.request(row.method, row.path, headers=headers)
                    if answer.status_code == 500:
                        reached.add((row, secret))
        assert reached
        for row, secret in reached:
            assert secret != "nobody"
            assert Scope(secret).includes(Scope(row.scope))


@pytest.mark.parametrize("service", SERVICES)
async def test_grpc_when_called_lets_in_the_services_and_nobody_else(service: str, tokens_file: Path) -> None:
    file, module = CONTRACTS[service]
    names = list(file.services_by_name)
    keyring = Keyring.open(
        token=OWN_SECRET, token_file=None, tokens_file=tokens_file, is_development=True, clock=SystemClock()
    )

    def register(server: grpc.aio.Server) -> None:
        for name in names:
            getattr(module, f"add_{name}Servicer_to_server")(getattr(module, f"{name}Servicer")(), server)

    server = await start_server([register], service_names=[], address="127.0.0.1:0", token=keyring)
    channel: Any
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for method in methods_of(file):
                for secret, expected in (
                    (None, grpc.StatusCode.UNAUTHENTICATED),
                    ("nobody", grpc.StatusCode.UNAUTHENTICATED),
                    ("submit", grpc.StatusCode.PERMISSION_DENIED),
                    ("operate", grpc.StatusCode.PERMISSION_DENIED),
                    # The generated servicers implement nothing: this is what their handlers raise.
                    ("internal", grpc.StatusCode.INTERNAL),
                    (OWN_SECRET, grpc.StatusCode.INTERNAL),
                ):
                    metadata = [("authorization", f"Bearer {secret}")] if secret else []
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(f"/{method}")(b"", metadata=metadata, timeout=10)
                    assert refused.value.code() is expected, (method, secret)
    finally:
        await server.stop(0)
