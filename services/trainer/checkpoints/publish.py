"""Publishing: bringing the newest committed version to the engines, while training goes on.

Owns one background loop a run. It asks the rollout service to serve a checkpoint, stores what came
of it and retries with growing waits. Only the newest version counts: one that is overtaken while it
waits is never sent. Training never waits for a publish; the staleness bound is what limits the lag.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from practicum.clock import Clock
from practicum.errors import PracticumError
from practicum.telemetry.logs import get_logger
from practicum.v1 import rollout_pb2 as pb
from services.trainer.events import Events
from services.trainer.metrics import TrainerMetrics
from services.trainer.store import TrainerStore

log = get_logger("trainer.publish")

MAX_RETRY_S = 30.0
Send = Callable[[pb.PublishWeightsRequest], Awaitable[pb.PublishWeightsResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredProbe:
    """A sequence with the trainer's own logprobs, to compare an engine's with."""

    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]  # of each token given those before it; 0 for the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A committed version that engines should serve."""

    weight_version: int
    path: str
    manifest_sha256: str
    probes: tuple[ScoredProbe, ...]


class Publisher:
    """Publishes the versions of one run, newest first and newest only."""

    def __init__(
        self,
        *,
        run_id: str,
        send: Send | None,
        store: TrainerStore,
        metrics: TrainerMetrics,
        events: Events,
        clock: Clock,
        tolerance: float,
        first_retry_s: float,
    ) -> None:
        self._run_id = run_id
        self._send = send
        self._store = store
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self._tolerance = tolerance
        self._first_retry_s = first_retry_s
        self._newest: Publication | None = None
        self._sending: Publication | None = None
        self._offered = asyncio.Event()
        self._served = asyncio.Event()
        self._served.set()
        # Until one publish went through, the engines may serve another run, or newer versions of this one.
        self._takes_over = True

    def offer(self, publication: Publication) -> None:
        """Make this the version to serve; an older one that still waits is forgotten."""
        self._newest = publication
        self._served.clear()
        self._offered.set()

    @property
    def versions_in_use(self) -> frozenset[int]:
        """Versions whose folders an engine may be reading, or will."""
        return frozenset(held.weight_version for held in (self._newest, self._sending) if held is not None)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until the newest version is served; False where that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._served.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Publish until cancelled; without a rollout service there is nothing to do."""
        if self._send is None:
            return
        retry_s = self._first_retry_s
        while True:
            await self._offered.wait()
            self._offered.clear()
            publication = self._newest
            assert publication is not None
            self._sending = publication
            served = await self._publish(publication)
            self._sending = None
            if served and self._newest is publication:
                self._newest = None
                self._served.set()
            if served:
                retry_s = self._first_retry_s
                continue
            # A newer version need not wait for the back-off of an older one.
            try:
                async with asyncio.timeout(retry_s):
                    await self._offered.wait()
            except TimeoutError:
                self._offered.set()
            retry_s = min(retry_s * 2, MAX_RETRY_S)

    async def _publish(self, publication: Publication) -> bool:
        started_s = self._clock.monotonic()
        error, engines = "", []
        try:
            assert self._send is not None
            response = await self._send(self._request(publication))
            engines = list(response.engines)
            if not response.ok:
                failed = [f"{engine.engine_id}: {engine.error}" for engine in engines if not engine.ok]
                error = "; ".join(failed) or "the rollout service refused without a reason"
        except PracticumError as refusal:
            error = str(refusal)
        seconds = self._clock.monotonic() - started_s
        await self._store.runs.record_publish(
            self._run_id,
            publication.weight_version,
            ok=not error,
            error=error,
            publish={
                "seconds": round(seconds, 4),
                "logprob_diff_max": max(
                    (engine.max_logprob_diff for engine in engines if math.isfinite(engine.max_logprob_diff)),
                    default=None,
                ),
                "engines": [_engine_result(engine) for engine in engines],
                "error": error,
            },
        )
        self._metrics.publishes.labels(result="failed" if error else "served").inc()
        if error:
            log.warning(
                "version.publish_failed",
                run_id=self._run_id,
                weight_version=publication.weight_version,
                error=error,
            )
            return False
        self._takes_over = False
        await self._events.version_published(self._run_id, publication.weight_version)
        self._metrics.publish_seconds.observe(seconds)
        log.info(
            "version.published",
            run_id=self._run_id,
            weight_version=publication.weight_version,
            seconds=round(seconds, 4),
        )
        return True

    def _request(self, publication: Publication) -> pb.PublishWeightsRequest:
        return pb.PublishWeightsRequest(
            run_id=self._run_id,
            weight_version=publication.weight_version,
            path=publication.path,
            manifest_sha256=publication.manifest_sha256,
            probes=[
                pb.Probe(
                    token_ids=probe.token_ids_T.astype("<i4").tobytes(),
                    logprobs=probe.logprobs_T.astype("<f4").tobytes(),
                )
                for probe in publication.probes
            ],
            tolerance=self._tolerance,
            rollback=self._takes_over,
        )


def _engine_result(engine: pb.EnginePublishResult) -> dict[str, object]:
    return {
        "engine_id": engine.engine_id,
        "ok": engine.ok,
        "weight_version": engine.weight_version,
        "logprob_diff_max": engine.max_logprob_diff if math.isfinite(engine.max_logprob_diff) else None,
        "paused_s": engine.paused_s,
        "error": engine.error,
    }
