"""gRPC plumbing over a real connection: tokens, errors by code word, deadlines, sizes, health."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from practicum.errors import InvalidInput, NotFound, Overloaded, PracticumError, Unauthorized
from practicum.rpc.client import RpcUnavailable, call, connect
from practicum.rpc.server import RpcServer, start_server
from practicum.v1 import trainer_pb2, trainer_pb2_grpc

SERVICE = "practicum.v1.TrainerService"
NUM_CHUNKS, CHUNK_BYTES = 80, 1024 * 1024


class Servicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers by the run id it is asked for."""

    async def GetRun(self, request: trainer_pb2.GetRunRequest, context: Any) -> trainer_pb2.Run:
        match request.run_id:
            case "missing":
                raise NotFound("run missing")
            case "bad":
                raise InvalidInput("run_id", "give the id of a run")
            case "busy":
                raise Overloaded("come back", retry_after_s=7)
            case "bug":
                raise RuntimeError("a secret path")
            case "slow":
                await asyncio.Event().wait()
        return trainer_pb2.Run(run_id=request.run_id)

    async def FetchTrajectory(
        self, request: trainer_pb2.FetchTrajectoryRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.TrajectoryChunk]:
        for _ in range(NUM_CHUNKS):
            yield trainer_pb2.TrajectoryChunk(data=b"x" * CHUNK_BYTES)

    async def ListRuns(
        self, request: trainer_pb2.ListRunsRequest, context: Any
    ) -> trainer_pb2.ListRunsResponse:
        return trainer_pb2.ListRunsResponse()


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    made = await start_server(
        [lambda s: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Servicer(), s)],
        service_names=[SERVICE],
        address="127.0.0.1:0",
        token="right",
        intake=[f"/{SERVICE}/ListRuns"],
    )
    yield made
    await made.stop(0)


@pytest.fixture
async def stub(server: RpcServer) -> AsyncIterator[Any]:
    async with connect(f"127.0.0.1:{server.port}", token="right") as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel)


async def get_run(stub: Any, run_id: str, timeout_s: float = 10) -> trainer_pb2.Run:
    run: trainer_pb2.Run = await call(
        stub.GetRun, trainer_pb2.GetRunRequest(run_id=run_id), timeout_s=timeout_s
    )
    return run


async def test_call_when_the_token_is_right_answers(stub: Any) -> None:
    assert (await get_run(stub, "r1")).run_id == "r1"


async def test_call_when_the_token_is_wrong_is_refused(server: RpcServer) -> None:
    async with connect(f"127.0.0.1:{server.port}", token="wrong") as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        with pytest.raises(Unauthorized):
            await get_run(stub, "r1")
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.FetchTrajectory(trainer_pb2.FetchTrajectoryRequest(), timeout=5):
                pass


async def test_call_when_the_service_raises_gives_the_same_error_by_its_code(stub: Any) -> None:
    with pytest.raises(NotFound, match="run missing"):
        await get_run(stub, "missing")
    with pytest.raises(InvalidInput) as invalid:
        await get_run(stub, "bad")
    assert (invalid.value.field, invalid.value.message) == ("run_id", "give the id of a run")
    with pytest.raises(Overloaded) as busy:
        await get_run(stub, "busy")
    assert busy.value.retry_after_s == 7


async def test_call_when_the_service_has_a_bug_hides_its_text(stub: Any) -> None:
    with pytest.raises(PracticumError) as caught:
        await get_run(stub, "bug")
    assert "secret" not in str(caught.value)


async def test_F17_call_when_the_deadline_passes_is_unavailable(stub: Any) -> None:
    with pytest.raises(RpcUnavailable, match="deadline"):
        await get_run(stub, "slow", timeout_s=0.2)


async def test_F01_stream_when_the_body_passes_64_mib_arrives_whole(stub: Any) -> None:
    size = 0
    async for chunk in stub.FetchTrajectory(trainer_pb2.FetchTrajectoryRequest(), timeout=60):
        size += len(chunk.data)
    assert size == NUM_CHUNKS * CHUNK_BYTES


async def test_F01_call_when_a_message_passes_4_mib_is_delivered(stub: Any) -> None:
    run_id = "y" * (6 * 1024 * 1024)
    assert (await get_run(stub, run_id)).run_id == run_id


async def test_health_and_reflection_when_asked_without_a_token_answer(server: RpcServer) -> None:
    channel: Any  # the published annotations of these two stubs know no asyncio channel
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for listing in reflection.ServerReflectionInfo(iter([request]), timeout=5):
            names = {service.name for service in listing.list_services_response.service}
            assert SERVICE in names
            break


async def test_server_when_it_drains_refuses_what_begins_and_answers_the_rest(
    server: RpcServer, stub: Any
) -> None:
    listing = trainer_pb2.ListRunsRequest()
    await call(stub.ListRuns, listing, timeout_s=10)
    await server.drain()
    with pytest.raises(RpcUnavailable, match="draining"):
        await call(stub.ListRuns, listing, timeout_s=10)
    assert (await get_run(stub, "r1")).run_id == "r1"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_call_when_the_server_stops_in_the_middle_is_unavailable(server: RpcServer, stub: Any) -> None:
    calling = asyncio.create_task(get_run(stub, "slow"))
    await get_run(stub, "r1")  # the slow one is there too
    await server.stop(0.1)
    with pytest.raises(RpcUnavailable):
        await calling
