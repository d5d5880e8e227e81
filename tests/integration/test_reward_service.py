"""The reward service as a process: gRPC, the grading stream on Redis, REST, and its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from practicum.cli.ports import free_port
from practicum.errors import Conflict, InvalidInput, NotFound, Overloaded, Unauthorized
from practicum.queue.redis_streams import RedisQueue
from practicum.queue.streams import GRADING, trajectories
from practicum.rpc.client import RpcUnavailable, call, connect
from practicum.v1 import reward_pb2 as pb
from practicum.v1 import reward_pb2_grpc, trajectory_pb2
from tests.fixtures.endpoint_table import operation_rows, operations_of
from tests.fixtures.reward import (
    BROKEN,
    FIXED,
    TESTS,
    changed,
    grade_request,
    make_task,
    make_trajectory,
    task_to_pb,
    workspace_to_pb,
)

TOKEN = "token-of-the-test"
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A running reward service."""

    popen: subprocess.Popen[bytes]
    rest: str
    rpc_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running reward service and a channel to it."""

    process: Process
    channel: grpc.aio.Channel

    @property
    def sandboxes(self) -> reward_pb2_grpc.SandboxServiceStub:
        return reward_pb2_grpc.SandboxServiceStub(self.channel)

    @property
    def gradings(self) -> reward_pb2_grpc.GradingServiceStub:
        return reward_pb2_grpc.GradingServiceStub(self.channel)


@contextmanager
def running(redis_url: str, folder: Path, *, drain_timeout_s: float = 1.0) -> Iterator[Process]:
    """Starts the service, waits until it is ready, and ends it."""
    rest_port, rpc_port = free_port(), free_port()
    environment = os.environ | {
        "PRACTICUM_TOKEN": TOKEN,
        "PRACTICUM_REDIS_URL": redis_url,
        "PRACTICUM_DATABASE_URL": f"sqlite:///{folder}/reward.sqlite",
        "PRACTICUM_REST_PORT": str(rest_port),
        "PRACTICUM_RPC_PORT": str(rpc_port),
        "PRACTICUM_REWARD_MAX_SESSIONS": "4",
        "PRACTICUM_DRAIN_TIMEOUT_S": str(drain_timeout_s),
    }
    command = [sys.executable, "-m", "services.reward.main"]
    popen = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    process = Process(popen=popen, rest=f"http://127.0.0.1:{rest_port}", rpc_address=f"127.0.0.1:{rpc_port}")
    try:
        deadline_s = time.monotonic() + 90
        while not _is_ready(process.rest):
            assert popen.poll() is None, "the service ended at start"
            assert time.monotonic() < deadline_s, "the service was not ready in 90 s"
            time.sleep(0.1)
        yield process
    finally:
        popen.terminate()
        popen.wait(timeout=30)


def _is_ready(rest: str) -> bool:
    try:
        return httpx.get(f"{rest}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def shared(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One service for the tests that leave it running."""
    with running(redis_url, tmp_path_factory.mktemp("reward")) as process:
        yield process


@pytest.fixture
async def service(shared: Process) -> AsyncIterator[Service]:
    channel = connect(shared.rpc_address, token=TOKEN)
    yield Service(process=shared, channel=channel)
    await channel.close()


def test_endpoints_of_the_process_are_those_of_the_table(shared: Process) -> None:
    document = httpx.get(f"{shared.rest}/openapi.json", timeout=TIMEOUT_S).json()
    assert sorted(operations_of("reward", document)) == operation_rows("reward")


async def test_an_episode_over_grpc(service: Service) -> None:
    stub = service.sandboxes
    opening = pb.OpenRequest(
        session_id="ep_1-1",
        task_id="t",
        workspace=workspace_to_pb(make_task().workspace),
        tools=["read_file", "edit_file", "run_tests", "finish"],
    )
    for _ in range(2):
        opened = await call(stub.Open, opening, timeout_s=TIMEOUT_S)
        assert (opened.session_id, opened.backend) == ("ep_1-1", "bubblewrap")

    async def tool(call_id: str, name: str, **arguments: str) -> pb.CallToolResponse:
        request = pb.CallToolRequest(
            session_id="ep_1-1", call_id=call_id, name=name, arguments_json=json.dumps(arguments)
        )
        return await call(stub.CallTool, request, timeout_s=TIMEOUT_S)

    assert (await tool("1", "read_file", path="calc.py")).output == BROKEN
    assert (await tool("2", "run_tests")).output == "2 failed\ntest_a: assert -1 == 5\ntest_b: assert 0 == 2"
    for _ in range(2):  # a retry of the same call edits once
        assert (await tool("3", "edit_file", path="calc.py", old="a-b", new="a+b")).output == "edited calc.py"
    assert (await tool("4", "run_tests")).output == "2 passed"
    assert (await tool("5", "bash", command="ls")).is_error
    assert (await tool("6", "finish")).ends_episode
    diff = await call(stub.Snapshot, pb.SnapshotRequest(session_id="ep_1-1"), timeout_s=TIMEOUT_S)
    assert [(file.path, file.content) for file in diff.changed] == [("calc.py", FIXED.encode())]
    for _ in range(2):
        await call(stub.Close, pb.CloseRequest(session_id="ep_1-1"), timeout_s=TIMEOUT_S)
    with pytest.raises(NotFound):
        await tool("7", "run_tests")
    tools = await call(stub.ListTools, pb.ListToolsRequest(), timeout_s=TIMEOUT_S)
    assert json.loads(next(t for t in tools.tools if t.name == "bash").parameters_json)["required"] == [
        "command"
    ]


async def test_bad_requests_over_grpc_have_their_own_codes(service: Service) -> None:
    stub = service.sandboxes

    async def opened(session_id: str, files: dict[str, str], **limits: float) -> None:
        workspace = pb.Workspace(
            files=[pb.WorkspaceFile(path=path, content=text.encode()) for path, text in files.items()]
        )
        request = pb.OpenRequest(session_id=session_id, workspace=workspace)
        for name, value in limits.items():
            setattr(request.limits, name, value)
        await call(stub.Open, request, timeout_s=TIMEOUT_S)

    with pytest.raises(InvalidInput, match=r"workspace\.files\[0\]\.path"):
        await opened("a", {"../x": ""})
    with pytest.raises(InvalidInput, match=r"limits\.call_wall_s"):
        await opened("a", {}, call_wall_s=1e9)
    await opened("a", {"x": "1"})
    with pytest.raises(Conflict):
        await opened("a", {"x": "2"})
    for name in ("b", "c", "d"):
        await opened(name, {})
    with pytest.raises(Overloaded):
        await opened("e", {})
    stranger = connect(service.process.rpc_address, token="wrong")
    with pytest.raises(Unauthorized):
        other = reward_pb2_grpc.SandboxServiceStub(stranger)
        await call(other.ListTools, pb.ListToolsRequest(), timeout_s=TIMEOUT_S)
    await stranger.close()
    for name in ("a", "b", "c", "d"):
        await call(stub.Close, pb.CloseRequest(session_id=name), timeout_s=TIMEOUT_S)


async def test_the_grading_stream_and_the_stored_grade(service: Service, redis_url: str) -> None:
    queue = RedisQueue(redis_url)
    for name, changes in (("ep_1-1", changed({"calc.py": FIXED})), ("ep_2-1", changed({"calc.py": "x("}))):
        await queue.publish(GRADING, grade_request(make_trajectory(name, run_id="run_int"), changes))
    rewards: dict[str, float] = {}
    async with asyncio.timeout(30):
        while len(rewards) < 2:
            stream = trajectories("run_int")
            for entry in await queue.read(stream, "test", "test", max_entries=4, wait_s=1):
                graded = entry.unpack(trajectory_pb2.Trajectory)
                rewards[graded.trajectory_id] = graded.grade.reward
    await queue.close()
    assert rewards == {"ep_1-1": 1.0, "ep_2-1": 0.0}
    async with httpx.AsyncClient(
        base_url=service.process.rest, headers={"Authorization": f"Bearer {TOKEN}"}
    ) as client:
        stored = (await client.get("/v1/grades/ep_1-1")).json()
        assert (stored["reward"], stored["outcome"], stored["run_id"]) == (1.0, "completed", "run_int")
        first = (await client.get("/v1/grades", params={"page_size": 1})).json()
        rest = (await client.get("/v1/grades", params={"page_token": first["next_page_token"]})).json()
        assert {item["trajectory_id"] for item in first["items"] + rest["items"]} == {"ep_1-1", "ep_2-1"}
        assert rest["next_page_token"] is None
        missing = await client.get("/v1/grades/none")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


async def test_grade_and_admit_over_grpc(service: Service) -> None:
    stub = service.gradings
    request = grade_request(make_trajectory("ep_9-1"), changed({"calc.py": FIXED}))
    answer = await call(stub.Grade, request, timeout_s=TIMEOUT_S)
    assert answer.grade.reward == 1.0
    assert [test.test_id for test in answer.grade.tests] == ["test_calc.py::test_a", "test_calc.py::test_b"]
    task = task_to_pb(make_task(workspace={"calc.py": BROKEN}, hidden={"test_hidden.py": TESTS}))
    reference = pb.WorkspaceDiff(changed=[pb.WorkspaceFile(path="calc.py", content=FIXED.encode())])
    admitted = await call(stub.Admit, pb.AdmitRequest(task=task, reference=reference), timeout_s=TIMEOUT_S)
    assert admitted.admitted, admitted
    wrong = pb.WorkspaceDiff(changed=[pb.WorkspaceFile(path="calc.py", content=b"def add(a, b): return 0\n")])
    refused = await call(stub.Admit, pb.AdmitRequest(task=task, reference=wrong), timeout_s=TIMEOUT_S)
    assert [check.name for check in refused.checks if not check.ok] == ["reference_passes"]
    for hidden, named in (({"data.txt": "x"}, "data.txt"), ({"test_b.py": "def (:\n"}, "test_b.py")):
        admitting = pb.AdmitRequest(task=task_to_pb(make_task(hidden=hidden)))
        refused = await call(stub.Admit, admitting, timeout_s=TIMEOUT_S)
        assert [(check.name, check.ok) for check in refused.checks] == [("well_formed", False)]
        assert not refused.admitted
        assert named in refused.checks[0].detail
    leaked = task_to_pb(make_task())  # its hidden tests are the visible ones
    refused = await call(stub.Admit, pb.AdmitRequest(task=leaked), timeout_s=TIMEOUT_S)
    assert [check.name for check in refused.checks if not check.ok] == ["no_leak"]


async def test_rest_grades_now_and_shows_the_sandbox(service: Service) -> None:
    body = {
        "workspace": {"files": {"calc.py": BROKEN}},
        "changed": {"calc.py": FIXED},
        "grader": {"files": {"test_hidden.py": TESTS}, "editable": ["calc.py"]},
    }
    async with httpx.AsyncClient(
        base_url=service.process.rest, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=TIMEOUT_S
    ) as client:
        assert (await client.post("/v1/grades", json=body)).json()["reward"] == 1.0
        leaving = {"files": {"../x": ""}}
        bad = await client.post("/v1/grades", json=body | {"workspace": leaving})
        assert bad.status_code == 422
        assert bad.json()["errors"][0]["field"] == "workspace.files[0].path"
        broken = {"files": {"test_hidden.py": "def test_a(:\n"}, "editable": ["calc.py"]}
        bad = await client.post("/v1/grades", json=body | {"grader": broken})
        assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "grader.files")
        assert "test_hidden.py" in bad.json()["detail"]
        unknown = await client.post("/v1/grades", json=body | {"graders": 1})
        assert (unknown.status_code, unknown.json()["errors"][0]["field"]) == (422, "graders")
        shown = (await client.get("/v1/sandbox/capabilities")).json()
        assert shown["attacks"]["network"] == "held"
        metrics = (await client.get("/metrics")).text
        assert 'practicum_reward_grades_total{outcome="completed"}' in metrics
        assert (await client.get("/v1/grades", headers={"Authorization": "x"})).status_code == 401
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/v1/grades", "/v1/grades/{trajectory_id}", "/v1/sandbox/capabilities"} <= paths.keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_end_of_the_service_ends_its_sandboxes(
    redis_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with running(redis_url, tmp_path) as process:
        channel = connect(process.rpc_address, token=TOKEN)
        stub = reward_pb2_grpc.SandboxServiceStub(channel)
        await call(stub.Open, pb.OpenRequest(session_id="s"), timeout_s=TIMEOUT_S)
        await channel.close()
        children = _descendants(process.popen.pid)
        assert len(children) >= 3  # bubblewrap, the fork server, the session
        process.popen.send_signal(number)
        status = await asyncio.to_thread(process.popen.wait, 20)
        assert status == (0 if number == signal.SIGTERM else -number)
        await _gone(children)


async def test_a_stop_refuses_new_sessions_and_goes_on_with_the_open_one(
    redis_url: str, tmp_path: Path
) -> None:
    with running(redis_url, tmp_path, drain_timeout_s=60) as process:
        channel = connect(process.rpc_address, token=TOKEN)
        stub = reward_pb2_grpc.SandboxServiceStub(channel)
        opening = pb.OpenRequest(session_id="s", workspace=workspace_to_pb(make_task().workspace))
        opening.tools.append("read_file")
        await call(stub.Open, opening, timeout_s=TIMEOUT_S)
        process.popen.send_signal(signal.SIGTERM)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=process.rest, timeout=TIMEOUT_S, headers=headers) as http:
            async with asyncio.timeout(TIMEOUT_S):
                while (await http.get("/readyz")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            refused = await http.get("/v1/grades")
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
            assert (await http.get("/healthz")).status_code == 200
        with pytest.raises(RpcUnavailable, match="draining"):
            await call(stub.Open, pb.OpenRequest(session_id="t"), timeout_s=TIMEOUT_S)
        reading = pb.CallToolRequest(
            session_id="s", call_id="1", name="read_file", arguments_json='{"path": "calc.py"}'
        )
        assert (await call(stub.CallTool, reading, timeout_s=TIMEOUT_S)).output == BROKEN
        assert process.popen.poll() is None
        await call(stub.Close, pb.CloseRequest(session_id="s"), timeout_s=TIMEOUT_S)
        assert await asyncio.to_thread(process.popen.wait, 20) == 0
        await channel.close()


async def _gone(pids: list[int]) -> None:
    async with asyncio.timeout(10):
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)


def _descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_descendants(int(child))]
    return found
