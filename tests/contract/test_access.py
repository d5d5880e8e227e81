"""The doors themselves, over HTTP and gRPC: odd headers, unread bodies, logs, a secret that is replaced."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from fastapi import APIRouter, FastAPI
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from practicum.auth.entries import sha256_of
from practicum.auth.keyring import Keyring
from practicum.auth.scopes import Scope
from practicum.clock import SystemClock
from practicum.errors import Forbidden, Unauthorized
from practicum.rest.access import ScopedRoute, needs
from practicum.rest.app import create_app
from practicum.rest.models import ApiModel
from practicum.rpc.client import call, connect
from practicum.rpc.server import RpcServer, start_server
from practicum.telemetry.logs import configure_logs, get_logger
from practicum.v1 import trainer_pb2, trainer_pb2_grpc

OWN = "the-services-own-secret-of-the-test"
NEXT = "the-secret-that-comes-after-it"
SECRET = "practicum_the-secret-of-the-caller-ci"
log = get_logger("test")


class Body(ApiModel):
    """A body with one field."""

    name: str


def make_keyring(folder: Path) -> Keyring:
    """Of the services' secret in `token`, and of the caller ci, who may submit, in `tokens.json`."""
    (folder / "token").write_text(OWN)
    entry = {"name": "ci", "scopes": ["submit"], "sha256": sha256_of(SECRET)}
    (folder / "tokens.json").write_text(json.dumps({"tokens": [entry]}))
    return Keyring.open(
        token="",
        token_file=folder / "token",
        tokens_file=folder / "tokens.json",
        is_development=False,
        clock=SystemClock(),
    )


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    router = APIRouter(route_class=ScopedRoute)

    @router.post("/things", dependencies=[needs(Scope.SUBMIT)])
    async def submit(body: Body) -> dict[str, str]:
        log.info("thing.made", name=body.name)
        if body.name == "bug":
            raise RuntimeError("a bug")
        return {"name": body.name}

    @router.post("/things:end", dependencies=[needs(Scope.OPERATE)])
    async def operate(body: Body) -> dict[str, str]:
        return {"name": body.name}

    return create_app(
        title="t", description="d", token=make_keyring(tmp_path), routers=[router], readiness={}
    )


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as made:
        yield made


async def post(
    client: httpx.AsyncClient, *shown: bytes, path: str = "/things", name: str = "a"
) -> httpx.Response:
    headers = [(b"Authorization", value) for value in shown]
    return await client.post(path, json={"name": name}, headers=headers)


@pytest.mark.parametrize(
    ("shown", "status", "detail"),
    [
        ([f"bearer {SECRET}"], 200, ""),
        ([f"BEARER  {SECRET} "], 200, ""),
        ([], 401, "show a token"),
        ([SECRET], 401, "show a token"),
        ([f"Token {SECRET}"], 401, "show a token"),
        ([f"Bearer {SECRET}x"], 401, "not known"),
        ([f"Bearer {sha256_of(SECRET)}"], 401, "not known"),
        ([f"Bearer {SECRET}", f"Bearer {SECRET}"], 401, "several"),
        (["Bearer x", f"Bearer {SECRET}"], 401, "several"),
        (["Bearer \u00e9\u00ff\u0080"], 401, "not known"),
        (["\u00e9\u00ff"], 401, "show a token"),
    ],
)
async def test_request_when_its_header_is_odd_is_let_in_or_told_why_not(
    client: httpx.AsyncClient, shown: list[str], status: int, detail: str
) -> None:
    answer = await post(client, *(value.encode("latin-1") for value in shown))
    assert answer.status_code == status
    assert detail in answer.json().get("detail", "")


async def test_request_when_refused_has_no_body_read(app: FastAPI) -> None:
    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    async def ask(path: str, secret: str) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {secret}".encode()), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        await app(scope, receive, send)
        return sent

    assert (await ask("/things", "nobody"))[0]["status"] == 401
    assert (await ask("/things:end", SECRET))[0]["status"] == 403
    # With a token that opens it the body is asked for, so the two above do say something.
    assert (await ask("/things", SECRET))[0]["status"] == 400


async def test_request_when_let_in_names_its_caller_in_its_logs_alone(client: httpx.AsyncClient) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        await post(client, f"Bearer {SECRET}".encode())
        await post(client, f"Bearer {OWN}".encode())
        await post(client, f"Bearer {SECRET}".encode(), path="/things:end")
        await post(client, b"Bearer nobody")
        await post(client, f"Bearer {SECRET}".encode(), name="bug")
    said = [(line["event"], line.get("caller"), bool(line.get("trace_id"))) for line in lines]
    assert said == [
        ("thing.made", "ci", True),
        ("thing.made", "services", True),
        ("rest.refused", "ci", True),
        ("rest.refused", None, True),
        ("thing.made", "ci", True),
        ("rest.failed", "ci", True),
    ]
    assert "caller" not in structlog.contextvars.get_contextvars()


async def test_logs_when_requests_fail_in_every_way_hold_no_secret(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("test", "debug")
    try:
        texts = [
            (await post(client, *shown, path=path, name=name)).text
            for shown in (
                [f"Bearer {SECRET}".encode()],
                [f"Bearer {OWN}".encode()],
                [f"Bearer {SECRET}x".encode()],
                [f"Bearer {SECRET}".encode()] * 2,
                [SECRET.encode()],
            )
            for path in ("/things", "/things:end")
            for name in ("a", "bug")
        ]
        written = capsys.readouterr().err
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    assert "rest.failed" in written
    assert "rest.refused" in written
    for secret in (SECRET, OWN, sha256_of(SECRET), sha256_of(OWN)):
        assert secret not in written
        assert not any(secret in text for text in texts)


def test_service_when_a_route_declares_no_scope_is_not_made() -> None:
    scoped, plain = APIRouter(route_class=ScopedRoute), APIRouter()
    with pytest.raises(ValueError, match="/open: declare one scope"):

        @scoped.get("/open")
        async def undeclared() -> None: ...

    with pytest.raises(ValueError, match="/both: declare one scope"):

        @scoped.get("/both", dependencies=[needs(Scope.SUBMIT), needs(Scope.OPERATE)])
        async def twice() -> None: ...

    @plain.get("/plain", dependencies=[needs(Scope.SUBMIT)])
    async def unguarded() -> None: ...

    with pytest.raises(ValueError, match="/plain: is no ScopedRoute"):
        create_app(title="t", description="d", token=OWN, routers=[plain], readiness={})


class Servicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers, and says so in the log."""

    async def GetRun(self, request: trainer_pb2.GetRunRequest, context: Any) -> trainer_pb2.Run:
        log.info("run.got")
        return trainer_pb2.Run(run_id=request.run_id)

    async def FetchTrajectory(
        self, request: trainer_pb2.FetchTrajectoryRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.TrajectoryChunk]:
        log.info("trajectory.fetched")
        yield trainer_pb2.TrajectoryChunk(data=b"x")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RpcServer]:
    made = await start_server(
        [lambda s: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Servicer(), s)],
        service_names=[],
        address="127.0.0.1:0",
        token=make_keyring(tmp_path),
    )
    yield made
    await made.stop(0)


async def get_run(channel: grpc.aio.Channel) -> str:
    stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
    run = await call(stub.GetRun, trainer_pb2.GetRunRequest(run_id="r"), timeout_s=10)
    return str(run.run_id)


async def test_call_when_the_scope_does_not_reach_is_forbidden_here_and_there(server: RpcServer) -> None:
    async with connect(f"127.0.0.1:{server.port}", token=SECRET) as channel:
        with pytest.raises(Forbidden, match="needs the scope 'internal'; the token 'ci' has submit"):
            await get_run(channel)
        stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.FetchTrajectory(trainer_pb2.FetchTrajectoryRequest(), timeout=10):
                pass
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_call_when_refused_by_a_proxy_without_our_words_is_forbidden_too() -> None:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the proxy says no")

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("practicum.v1.TrainerService", {"GetRun": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}", token=OWN) as channel:
            with pytest.raises(Forbidden, match="the proxy says no"):
                await get_run(channel)
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ([], "show a token"),
        ([OWN], "show a token"),
        ([f"Bearer {OWN}", f"Bearer {OWN}"], "several"),
        ([f"Bearer x{OWN}"], "not known"),
        ([f"bearer {OWN}"], None),
    ],
)
async def test_call_when_its_metadata_is_odd_is_let_in_or_told_why_not(
    server: RpcServer, shown: list[str], reason: str | None
) -> None:
    metadata = grpc.aio.Metadata(*(("authorization", value) for value in shown))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ask: Any = trainer_pb2_grpc.TrainerServiceStub(channel).GetRun
        request = trainer_pb2.GetRunRequest(run_id="r")
        if reason is None:
            assert (await ask(request, metadata=metadata, timeout=10)).run_id == "r"
            return
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
            await ask(request, metadata=metadata, timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_call_when_refused_has_its_request_left_unread(server: RpcServer) -> None:
    # Nonsense on the wire: whoever reads it fails before any handler runs.
    method = "/practicum.v1.TrainerService/GetRun"
    for token, status in ((OWN, grpc.StatusCode.UNKNOWN), ("nobody", grpc.StatusCode.UNAUTHENTICATED)):
        async with connect(f"127.0.0.1:{server.port}", token=token) as channel:
            ask: Any = channel.unary_unary(method)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(b"\xff\xff\xff", timeout=10)
            assert refused.value.code() is status


async def test_call_when_let_in_names_its_caller_in_its_logs_alone(server: RpcServer) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with connect(f"127.0.0.1:{server.port}", token=OWN) as channel:
            await get_run(channel)
            stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
            async for _ in stub.FetchTrajectory(trainer_pb2.FetchTrajectoryRequest(), timeout=10):
                pass
        async with connect(f"127.0.0.1:{server.port}", token="nobody") as channel:
            with pytest.raises(Unauthorized):
                await get_run(channel)
    assert [(line["event"], line.get("caller")) for line in lines] == [
        ("run.got", "services"),
        ("trajectory.fetched", "services"),
        ("rpc.refused", None),
    ]
    assert "nobody" not in str(lines)


async def test_secret_when_replaced_while_services_call_each_other_fails_no_call(
    server: RpcServer, tmp_path: Path
) -> None:
    shown = tmp_path / "of-the-caller"
    shown.write_text(OWN)
    keyring = Keyring.open(
        token="", token_file=shown, tokens_file=None, is_development=False, clock=SystemClock()
    )
    both, turned = f"{OWN}\n{NEXT}\n", f"{NEXT}\n{OWN}\n"
    # Each service has its own copy of the file; at every step either may have it first.
    steps = [("token", both), (shown.name, both), (shown.name, turned), ("token", turned)]
    steps += [(shown.name, NEXT), ("token", NEXT)]
    async with connect(f"127.0.0.1:{server.port}", token=keyring) as channel:
        for name, content in steps:
            (tmp_path / name).write_text(content)
            assert await get_run(channel) == "r"
        async with connect(f"127.0.0.1:{server.port}", token=OWN) as old:
            with pytest.raises(Unauthorized):
                await get_run(old)
