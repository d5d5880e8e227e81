"""Watches each engine: health, and that it still holds the weights it was given.

An engine is asked its label on every probe, so that one which restarted with its start-up weights between
two probes leaves routing and is loaded again, and does not sample as if nothing had happened. It is asked
before it enters routing too.
"""

import asyncio

from practicum.errors import EngineError
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from services.rollout.engine.generation import version_of
from services.rollout.engine.pool import Engine, EnginePool, Serving
from services.rollout.engine.weights import WeightPublisher

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
        self._met: set[Engine] = set()

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
        # Both before the health check: an engine that was left paused says it is unhealthy.
        if engine not in self._met and not await self._meet(engine):
            return
        if engine.needs_reload and engine.label:
            await self._reload(engine)
        healthy = await engine.client.is_healthy(timeout_s=self._probe_timeout_s)
        if not healthy and engine.weights_lock.locked():
            return
        if healthy and not engine.needs_reload:
            await self._check_weights(engine)
        if engine.gate.record(healthy):
            log.info("engine.health_changed", engine_id=engine.engine_id, in_routing=healthy)
        if engine.is_routable != was_routable:
            await self._pool.announce()

    async def _meet(self, engine: Engine) -> bool:
        """Let an engine go on that a process which died during an update left paused; False = not reached."""
        try:
            await engine.client.resume()
        except EngineError:
            return False
        self._met.add(engine)
        return True

    async def _check_weights(self, engine: Engine) -> None:
        known = engine.label
        label, path = await engine.client.served_weights()
        if self._publisher.is_changing or engine.label != known:
            return  # weights are on their way, or arrived meanwhile: the answer may be old
        if self._pool.serving is None:
            self._pool.serving = self._first_serving(label, path)
        serving = self._pool.serving
        if not engine.label and (label, path) == (serving.label, serving.path):
            engine.holds(label, serving)
        if engine.label == label and engine.held == serving and not engine.needs_reload:
            return
        engine.needs_reload = True
        engine.label = engine.label or label
        await self._reload(engine)

    async def _reload(self, engine: Engine) -> None:
        log.warning("engine.reload", engine_id=engine.engine_id, held=engine.label)
        try:
            await self._publisher.reload(engine)
        except EngineError as error:
            # It stays out until a reload succeeds; its health is still to be looked at.
            log.warning("engine.reload_failed", engine_id=engine.engine_id, error=str(error))

    def _first_serving(self, label: str, path: str) -> Serving:
        stored = self._stored
        if stored is not None and (stored.label, stored.path) == (label, path):
            return stored
        return Serving(run_id="", weight_version=version_of(label), label=label, path=path)
