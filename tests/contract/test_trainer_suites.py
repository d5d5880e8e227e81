"""What the trainer asks about suites, answered by the rollout service's own servicer."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from practicum.db.engine import create_engine
from practicum.db.migrate import upgrade
from practicum.errors import InvalidInput, Unauthorized
from practicum.rpc.client import RpcUnavailable, connect
from practicum.rpc.server import RpcServer, start_server
from practicum.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from services.rollout.main import MIGRATIONS
from services.rollout.rpc.servicer import RolloutServicer
from services.rollout.store.suites import Creation, Suite, SuiteStore
from services.rollout.tasks import Split, Task, TaskState
from services.trainer.rpc.suites import suite_check

NOW = datetime(2026, 1, 1, tzinfo=UTC)


async def add(store: SuiteStore, version: str, *members: tuple[Split, TaskState]) -> None:
    suite = Suite(
        suite_id=f"suite_{version}", name="bugs", version=version, body_digest=version, created_at=NOW
    )
    tasks = [
        Task(
            task_id=f"task_{version}_{position}",
            suite_id=suite.suite_id,
            position=position,
            name=f"t{position}",
            split=split,
            instruction="Fix it.",
            tools=(),
            tags=(),
            session_wall_s=0.0,
            spec=b"",
            reference=None,
            state=state,
        )
        for position, (split, state) in enumerate(members)
    ]
    await store.add_suite(suite, tasks, Creation(key=None, body_digest=version, response_json="{}", now=NOW))


@pytest.fixture
async def rollout(tmp_path: Path) -> AsyncIterator[RpcServer]:
    url = f"sqlite:///{tmp_path}/rollout.sqlite"
    await asyncio.to_thread(upgrade, url, MIGRATIONS)
    engine = create_engine(url)
    store = SuiteStore(engine)
    await add(store, "1", (Split.TRAIN, TaskState.ADMITTED), (Split.TRAIN, TaskState.REJECTED))
    await add(store, "2", (Split.TRAIN, TaskState.ADMITTING))
    await add(store, "3", (Split.TRAIN, TaskState.REJECTED), (Split.HELDOUT, TaskState.ADMITTED))
    nothing: Any = None  # what publishing needs
    servicer = RolloutServicer(
        pool=nothing, publisher=nothing, follower=nothing, trainer=nothing, suites=store
    )
    server = await start_server(
        [lambda server: add_RolloutServiceServicer_to_server(servicer, server)],
        service_names=["practicum.v1.RolloutService"],
        address="127.0.0.1:0",
        token="t",
    )
    yield server
    await server.stop(0)
    await engine.dispose()


@pytest.mark.parametrize("reference", ["suite_1", "bugs@1", "bugs@2"])
async def test_suite_check_when_a_task_may_be_sampled_passes(rollout: RpcServer, reference: str) -> None:
    async with connect(f"127.0.0.1:{rollout.port}", token="t") as channel:
        await suite_check(channel)(reference)


@pytest.mark.parametrize(
    ("reference", "word"),
    [("bugs", "no task"), ("bugs@4", "there is no suite"), ("bug", "there is no suite")],
)
async def test_suite_check_when_a_run_could_never_sample_names_the_field(
    rollout: RpcServer, reference: str, word: str
) -> None:
    async with connect(f"127.0.0.1:{rollout.port}", token="t") as channel:
        with pytest.raises(InvalidInput, match=word) as caught:
            await suite_check(channel)(reference)
    assert caught.value.field == "rollout.suite"


async def test_suite_check_when_nobody_knows_says_that(rollout: RpcServer) -> None:
    async with connect(f"127.0.0.1:{rollout.port}", token="wrong") as channel:
        with pytest.raises(Unauthorized):
            await suite_check(channel)("bugs")
    await rollout.stop(0)
    async with connect(f"127.0.0.1:{rollout.port}", token="t") as channel:
        with pytest.raises(RpcUnavailable):
            await suite_check(channel)("bugs")
