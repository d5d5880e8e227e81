"""The publisher: the newest version wins, failures are retried, and everything is written down."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry

from practicum.clock import SystemClock
from practicum.queue.memory import MemoryQueue
from practicum.rpc.client import RpcUnavailable
from practicum.v1 import rollout_pb2 as pb
from services.trainer.checkpoints.publish import Publication, Publisher, ScoredProbe
from services.trainer.events import Events
from services.trainer.metrics import TrainerMetrics
from services.trainer.store import TrainerStore


class Notes:
    """Stands where the store's runs stand, and keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[int, bool, str, dict[str, Any]]] = []

    async def record_publish(
        self, run_id: str, weight_version: int, *, ok: bool, error: str, publish: dict[str, Any]
    ) -> None:
        """Keep it."""
        self.notes.append((weight_version, ok, error, publish))


class Store:
    """A store with runs only."""

    def __init__(self) -> None:
        self.runs = Notes()


class Engines:
    """Answers publishes when it is allowed to."""

    def __init__(self) -> None:
        self.requests: list[pb.PublishWeightsRequest] = []
        self.may_answer = asyncio.Event()
        self.failures = 0

    async def send(self, request: pb.PublishWeightsRequest) -> pb.PublishWeightsResponse:
        """As RolloutService.PublishWeights."""
        self.requests.append(request)
        await self.may_answer.wait()
        if self.failures:
            self.failures -= 1
            raise RpcUnavailable("unavailable: nobody listens")
        engine = pb.EnginePublishResult(engine_id="e0", ok=True, max_logprob_diff=float("nan"), paused_s=0.1)
        return pb.PublishWeightsResponse(ok=True, engines=[engine], weight_version=request.weight_version)


def publication(version: int) -> Publication:
    probe = ScoredProbe(
        token_ids_T=np.array([1, 2], dtype=np.int32), logprobs_T=np.array([0, -1], dtype=np.float32)
    )
    return Publication(weight_version=version, path=f"/c/v{version}", manifest_sha256="ab", probes=(probe,))


@asynccontextmanager
async def publishing(engines: Engines, store: Store) -> AsyncIterator[Publisher]:
    publisher = Publisher(
        run_id="run_1",
        send=engines.send,
        store=cast(TrainerStore, store),
        metrics=TrainerMetrics(CollectorRegistry()),
        events=Events(MemoryQueue()),
        clock=SystemClock(),
        tolerance=0.05,
        first_retry_s=0.01,
    )
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()


async def test_publish_when_versions_pile_up_sends_only_the_newest() -> None:
    engines, store = Engines(), Store()
    async with publishing(engines, store) as publisher:
        publisher.offer(publication(1))
        await asyncio.sleep(0.01)
        for version in (2, 3, 4):
            publisher.offer(publication(version))
        assert publisher.versions_in_use == {1, 4}
        assert not await publisher.settled(0.01)
        engines.may_answer.set()
        assert await publisher.settled(5)
        assert publisher.versions_in_use == frozenset()
    assert [request.weight_version for request in engines.requests] == [1, 4]
    assert [(note[0], note[1]) for note in store.runs.notes] == [(1, True), (4, True)]


async def test_publish_when_it_fails_tries_again_and_says_so() -> None:
    engines, store = Engines(), Store()
    engines.failures = 2
    engines.may_answer.set()
    async with publishing(engines, store) as publisher:
        publisher.offer(publication(1))
        assert await publisher.settled(5)
    assert [(note[1], note[2]) for note in store.runs.notes] == [
        (False, "unavailable: nobody listens"),
        (False, "unavailable: nobody listens"),
        (True, ""),
    ]
    # Until one went through, engines may serve another run: each try may go back in versions.
    assert [request.rollback for request in engines.requests] == [True, True, True]


async def test_publish_when_an_engine_reports_no_number_stores_null() -> None:
    engines, store = Engines(), Store()
    engines.may_answer.set()
    async with publishing(engines, store) as publisher:
        publisher.offer(publication(1))
        assert await publisher.settled(5)
    publish = store.runs.notes[0][3]
    assert publish["logprob_diff_max"] is None
    assert publish["engines"][0]["logprob_diff_max"] is None
    request = engines.requests[0]
    assert np.frombuffer(request.probes[0].token_ids, dtype="<i4").tolist() == [1, 2]
    assert (request.tolerance, request.manifest_sha256, request.path) == (0.05, "ab", "/c/v1")
