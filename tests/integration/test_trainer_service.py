"""The trainer as a process of its own: Redis, gRPC, REST, and death at any moment."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from practicum.cli.ports import free_port
from practicum.clock import SystemClock
from practicum.db.engine import transaction
from practicum.errors import NotFound, Unauthorized
from practicum.queue.redis_streams import RedisQueue
from practicum.queue.streams import trajectories as stream_of
from practicum.rpc.client import call, connect
from practicum.rpc.server import RpcServer, start_server
from practicum.trajectory import Trajectory
from practicum.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, trajectory_pb2
from practicum.wire import trajectory_from_pb, trajectory_to_pb
from services.trainer.checkpoints.manifest import verify_folder
from services.trainer.store import open_store, tables
from tests.fixtures.endpoint_table import operation_rows, operations_of
from tests.fixtures.trainer import failed, model_folder, trajectory

TOKEN = "token-of-the-test"
START_S = 90.0


class RecordingRolloutService(rollout_pb2_grpc.RolloutServiceServicer):
    """A rollout service that serves whatever it is given, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[rollout_pb2.PublishWeightsRequest] = []

    async def PublishWeights(
        self, request: rollout_pb2.PublishWeightsRequest, context: Any
    ) -> rollout_pb2.PublishWeightsResponse:
        """Check the folder as an engine would find it."""
        verify_folder(Path(request.path), manifest_sha256=request.manifest_sha256)
        self.requests.append(request)
        return rollout_pb2.PublishWeightsResponse(ok=True, weight_version=request.weight_version)

    async def GetSuite(
        self, request: rollout_pb2.GetSuiteRequest, context: Any
    ) -> rollout_pb2.GetSuiteResponse:
        """Every suite is there."""
        return rollout_pb2.GetSuiteResponse(suite_id=request.suite, num_train_admitted=1)


class TrainerProcess:
    """`python -m services.trainer.main` over one folder."""

    def __init__(self, folder: Path, redis_url: str, rollout_port: int) -> None:
        self.folder = folder
        self.rpc_port = 0
        self.log_path = folder / "trainer.log"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PRACTICUM_TOKEN": TOKEN,
            "PRACTICUM_REDIS_URL": redis_url,
            "PRACTICUM_DATABASE_URL": f"sqlite:///{folder}/trainer.sqlite",
            "PRACTICUM_DATA_DIR": str(folder),
            "PRACTICUM_ROLLOUT_RPC": f"127.0.0.1:{rollout_port}",
            "PRACTICUM_TRAINER_RETRY_S": "0.05",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"})

    async def start(self) -> None:
        """Start it, on ports that are free now, and wait until it is ready."""
        rest_port, self.rpc_port = free_port(), free_port()
        self.client.base_url = f"http://127.0.0.1:{rest_port}"
        ports = {"PRACTICUM_REST_PORT": str(rest_port), "PRACTICUM_RPC_PORT": str(self.rpc_port)}
        self.process = await asyncio.to_thread(self._spawn, {**self.environment, **ports})
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log_path.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log_path.read_text()[-4000:]
            try:
                if (await self.client.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.05)

    def _spawn(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "services.trainer.main"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 60)

    async def make_run(self, model: Path, **changes: Any) -> str:
        """POST a small rl run; its id."""
        body: dict[str, Any] = {
            "name": "test",
            "stage": "rl",
            "model": {"path": str(model)},
            "num_steps": 2,
            "rollout": {
                "suite": "s",
                "group_size": 2,
                "groups_per_step": 1,
                "max_tokens": 64,
                "max_new_tokens": 16,
                "max_staleness": 100,
            },
            **changes,
        }
        answer = await self.client.post("/v1/runs", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run_id"])

    async def until(self, run_id: str, wanted: str, value: Any) -> dict[str, Any]:
        """Wait until a field of the run is at least, or is, `value`."""
        deadline = time.monotonic() + START_S
        while True:
            body: dict[str, Any] = (await self.client.get(f"/v1/runs/{run_id}")).json()
            reached = body[wanted]
            if reached == value or (
                isinstance(value, int) and (reached if reached is not None else -1) >= value
            ):
                return body
            assert time.monotonic() < deadline, (body, self.log_path.read_text()[-4000:])
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[RedisQueue]:
    opened = RedisQueue(redis_url)
    yield opened
    await opened.close()


@pytest.fixture
async def rollout() -> AsyncIterator[tuple[RecordingRolloutService, int]]:
    service = RecordingRolloutService()
    server: RpcServer = await start_server(
        [partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, service)],
        service_names=["practicum.v1.RolloutService"],
        address="127.0.0.1:0",
        token=TOKEN,
    )
    yield service, server.port
    await server.stop(0)


@pytest.fixture
async def trainer(
    tmp_path: Path, redis_url: str, rollout: tuple[RecordingRolloutService, int]
) -> AsyncIterator[TrainerProcess]:
    started = TrainerProcess(tmp_path, redis_url, rollout[1])
    await started.start()
    yield started
    if started.process is not None and started.process.poll() is None:
        assert await started.end(signal.SIGTERM) == 0, started.log_path.read_text()[-4000:]
    await started.client.aclose()


async def send(queue: RedisQueue, *members: Trajectory) -> None:
    for member in members:
        await queue.publish(stream_of(member.run_id), trajectory_to_pb(member))


async def until_nothing_is_owed(queue: RedisQueue, run_id: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        depth = await queue.depth(stream_of(run_id), "trainer")
        if (depth.undelivered, depth.pending) == (0, 0):
            return
        assert time.monotonic() < deadline, depth
        await asyncio.sleep(0.05)


def group_of(run_id: str, group: int) -> list[Trajectory]:
    return [trajectory(run_id=run_id, group=group, episode=k, reward=float(k)) for k in range(2)]


async def test_service_when_groups_arrive_trains_publishes_and_answers_on_every_edge(
    trainer: TrainerProcess, queue: RedisQueue, rollout: tuple[RecordingRolloutService, int], model: Path
) -> None:
    run_id = await trainer.make_run(model)
    await trainer.until(run_id, "published_version", 0)
    channel = connect(f"127.0.0.1:{trainer.rpc_port}", token=TOKEN)
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    listed = await call(
        stub.ListRuns, trainer_pb2.ListRunsRequest(states=[trainer_pb2.RUN_STATE_RUNNING]), timeout_s=10
    )
    (listed_run,) = listed.runs
    assert (listed_run.run_id, listed_run.weight_version, listed_run.groups_consumed) == (run_id, 0, 0)
    assert (listed_run.rollout.suite, listed_run.rollout.group_size, listed_run.num_steps) == ("s", 2, 2)

    held, *others = group_of(run_id, 0)
    quarantined = trajectory(run_id=run_id, group=5, group_size=7)
    await send(queue, held, quarantined)
    await trainer.until(run_id, "quarantined", 1)
    for wanted in (held, quarantined):
        chunks = stub.FetchTrajectory(
            trainer_pb2.FetchTrajectoryRequest(trajectory_id=wanted.trajectory_id), timeout=10
        )
        payload = b"".join([chunk.data async for chunk in chunks])
        assert trajectory_from_pb(trajectory_pb2.Trajectory.FromString(payload)).checksum == wanted.checksum

    await send(queue, *others, *group_of(run_id, 1))
    body = await trainer.until(run_id, "state", "completed")
    assert [step["trajectories"] for step in body["steps"]] == [2, 2]
    last = await call(stub.GetCheckpoint, trainer_pb2.GetCheckpointRequest(run_id=run_id), timeout_s=10)
    assert last.weight_version == 2
    verify_folder(Path(last.path), manifest_sha256=last.manifest_sha256)
    run = await call(stub.GetRun, trainer_pb2.GetRunRequest(run_id=run_id), timeout_s=10)
    assert (run.state, run.groups_consumed) == (trainer_pb2.RUN_STATE_COMPLETED, 2)
    with pytest.raises(NotFound):
        await call(stub.GetRun, trainer_pb2.GetRunRequest(run_id="run_of_nobody"), timeout_s=10)
    await channel.close()
    stranger = connect(f"127.0.0.1:{trainer.rpc_port}", token="wrong")
    with pytest.raises(Unauthorized):
        await call(
            trainer_pb2_grpc.TrainerServiceStub(stranger).ListRuns,
            trainer_pb2.ListRunsRequest(),
            timeout_s=10,
        )
    await stranger.close()
    assert {request.run_id for request in rollout[0].requests} == {run_id}
    assert rollout[0].requests[-1].weight_version == 2
    document = (await trainer.client.get("/openapi.json")).json()
    assert sorted(operations_of("trainer", document)) == operation_rows("trainer")
    metrics = (await trainer.client.get("/metrics")).text
    assert 'practicum_trainer_steps_total{updated="true"} 2.0' in metrics
    assert 'practicum_trainer_quarantined_total{reason="group_size"} 1.0' in metrics
    await until_nothing_is_owed(queue, run_id)


async def test_kill_9_when_it_comes_at_any_moment_trains_each_episode_exactly_once(
    trainer: TrainerProcess, queue: RedisQueue, model: Path
) -> None:
    num_groups, source = 8, random.Random(0)
    run_id = await trainer.make_run(model, num_steps=num_groups)
    members = [member for group in range(num_groups) for member in group_of(run_id, group)]
    source.shuffle(members)
    sent: list[Trajectory] = []
    for death in range(2):
        until_version = (death + 1) * 3
        # More than is trained before the death, some of it twice, so that the death leaves much owed.
        while len(sent) < 2 * until_version + 6 and members:
            sent.append(members.pop())
            await send(queue, sent[-1], *source.choices(sent, k=source.randint(0, 1)))
        await trainer.until(run_id, "weight_version", min(until_version - 1, _whole_groups(sent)))
        await asyncio.sleep(source.uniform(0, 0.15))
        assert await trainer.end(signal.SIGKILL) == -signal.SIGKILL
        await trainer.start()  # nobody tells it to go on
    await send(queue, *members, *sent[:4])
    body = await trainer.until(run_id, "state", "completed")

    assert [step["step"] for step in body["steps"]] == list(range(1, num_groups + 1))
    assert all(step["trajectories"] == 2 for step in body["steps"])
    store = open_store(f"sqlite:///{trainer.folder}/trainer.sqlite", SystemClock())
    async with transaction(store.engine) as connection:
        rows = (await connection.execute(select(tables.consumed))).all()
    await store.engine.dispose()
    wanted = {f"ep_{run_id}_{group}_{k}" for group in range(num_groups) for k in range(2)}
    assert sorted(row.episode_id for row in rows) == sorted(wanted)
    assert all(
        len({row.group_id for row in rows if row.step == step}) == 1 for step in range(1, num_groups + 1)
    )
    await until_nothing_is_owed(queue, run_id)
    folders = sorted(path.name for path in (trainer.folder / "checkpoints" / run_id).iterdir())
    assert folders == ["v000006", "v000007", "v000008"]


def _whole_groups(members: list[Trajectory]) -> int:
    groups = [member.group_id for member in members]
    return sum(groups.count(group_id) == 2 for group_id in set(groups))


async def test_sigterm_when_a_run_waits_ends_at_once_and_keeps_the_run(
    trainer: TrainerProcess, queue: RedisQueue, model: Path
) -> None:
    run_id = await trainer.make_run(model, num_steps=1)
    await trainer.until(run_id, "published_version", 0)
    await send(queue, failed(run_id=run_id, episode=0))
    started = time.monotonic()
    assert await trainer.end(signal.SIGTERM) == 0
    assert time.monotonic() - started < 10
    await trainer.start()
    assert (await trainer.until(run_id, "state", "running"))["weight_version"] == 0


async def test_service_when_the_default_token_meets_production_refuses_to_start(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PRACTICUM_TOKEN"}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "services.trainer.main"],
        env={**environment, "PRACTICUM_ENVIRONMENT": "production"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert b"PRACTICUM_TOKEN must be set" in done.stderr
