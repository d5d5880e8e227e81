"""Watches each engine: health, and that it still holds the weights it was given.

An engine is asked its label on every probe, so that one which restarted with its start-up weights between
two probes leaves routing and is loaded again, and does not sample as if nothing had happened.
"""

import asyncio

from practicum.errors import EngineError
from practicum.telemetry.logs import get_logger
from services.rollout.engine.generation import version_of
from services.rollout.engine.pool import Engine, EnginePool, Serving
from services.rollout.engine.weights import WeightPublisher
from services.rollout.pauses import pause

log = get_logger("rollout.engine")

_START_INTERVAL_S = 0.25  # while an engine is outside: the first minutes of a deployment


class EngineKeeper:
    """A worker loop over all engines."""

    def __init__(
        self,
        pool: EnginePool,
        publisher: WeightPublisher,
        *,
        stored: Serving | None,
        interval_s: float = 2.0,
        probe_timeout_s: float = 7.0,
    ) -> None:
        self._pool = pool
        self._publisher = publisher
        self._stored = stored  # what was served when this service last ran; None = it never served
        self._interval_s = interval_s
        self._probe_timeout_s = probe_timeout_s

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop`."""
        async with asyncio.TaskGroup() as group:
            for engine in self._pool.engines:
                group.create_task(self._watch(engine, stop))

    async def _watch(self, engine: Engine, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self.probe(engine)
            except EngineError as error:
                log.warning("engine.probe_failed", engine_id=engine.engine_id, error=str(error))
            except Exception:
                log.exception("engine.keeper_failed", engine_id=engine.engine_id)
            interval_s = self._interval_s if engine.is_routable else _START_INTERVAL_S
            await pause(stop, interval_s)

    async def probe(self, engine: Engine) -> None:
        """One look at one engine. Skipped while its weights change: a paused engine says it is unhealthy."""
        if engine.weights_lock.locked():
            return
        was_routable = engine.is_routable
        if engine.needs_reload and engine.label:
            # Before the health check: an engine that a failed update left paused says it is unhealthy.
            await self._reload(engine)
        healthy = await engine.client.is_healthy(timeout_s=self._probe_timeout_s)
        if not healthy and engine.weights_lock.locked():
            return
        if engine.gate.record(healthy):
            log.info("engine.health_changed", engine_id=engine.engine_id, in_routing=healthy)
        if healthy and engine.gate.is_open:
            await self._check_weights(engine)
        if engine.is_routable != was_routable:
            await self._pool.announce()

    async def _check_weights(self, engine: Engine) -> None:
        label, path = await engine.client.served_weights()
        if engine.weights_lock.locked():  # a publication began meanwhile; the answer may be old
            return
        if self._pool.serving is None:
            self._pool.serving = self._first_serving(label, path)
        serving = self._pool.serving
        if label == serving.label and not engine.needs_reload:
            if not engine.label:
                engine.holds(label)
            return
        if engine.label == label and not engine.needs_reload:
            return  # a publication is on its way through the pool
        engine.needs_reload = True
        engine.label = engine.label or label
        await self._reload(engine)

    async def _reload(self, engine: Engine) -> None:
        log.warning("engine.reload", engine_id=engine.engine_id, held=engine.label)
        await self._publisher.reload(engine)

    def _first_serving(self, label: str, path: str) -> Serving:
        stored = self._stored
        if stored is not None and (stored.label, stored.path) == (label, path):
            return stored
        return Serving(run_id="", weight_version=version_of(label), label=label, path=path)
