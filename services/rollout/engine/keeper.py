"""Watches each engine: health, and that it still holds the weights it was given.

An engine is asked its label on every probe, so that one which restarted with its start-up weights between
two probes leaves routing and is loaded again, and does not sample as if nothing had happened. It is asked
before it enters routing too. What is on record is read on every probe: an engine whose weights another
replica changes is left alone, one whose change came to no end is loaded again.
"""

import asyncio

from sqlalchemy.exc import SQLAlchemyError

from practicum.errors import EngineError, Overloaded
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from services.rollout.engine.pool import Engine, EnginePool
from services.rollout.engine.records import LoadState
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
        interval_s: float = 2.0,
        probe_timeout_s: float = 7.0,
    ) -> None:
        self._pool = pool
        self._publisher = publisher
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
            except Overloaded:
                pass  # another replica changes weights; this engine is looked at again
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
        if not await self._is_settled(engine):
            return
        healthy = await engine.client.is_healthy(timeout_s=self._probe_timeout_s)
        if not healthy and engine.weights_lock.locked():
            return
        if healthy and not engine.needs_reload:
            await self._check_weights(engine)
        if engine.gate.record(healthy):
            log.info("engine.health_changed", engine_id=engine.engine_id, in_routing=healthy)
        if not healthy and not engine.gate.is_open:
            self._met.discard(engine)  # whoever found it gone: it may come back paused
        if engine.is_routable != was_routable:
            await self._pool.announce()

    async def _meet(self, engine: Engine) -> bool:
        """Let an engine go on that a process which died left paused; False = not reached."""
        try:
            await engine.client.served_weights()  # first: who cannot be reached is worth no lease
            await self._publisher.meet(engine)
        except EngineError:
            return False
        self._met.add(engine)
        return True

    async def _is_settled(self, engine: Engine) -> bool:
        """Whether its weights stay as they are, after a reload where one was due."""
        try:
            view = await self._publisher.refresh()
        except SQLAlchemyError as error:
            # Its health is to be looked at all the same; what it serves is checked token by token.
            log.warning("engine.records_away", error=type(error).__name__)
            return True
        is_pending = engine.url in view.pending_urls
        if is_pending and (self._publisher.is_others(view) or self._publisher.is_changing):
            return False
        if is_pending or (engine.needs_reload and engine.label):
            if self._pool.serving is None:
                await self._publisher.adopt(engine, *await engine.client.served_weights())
            await self._reload(engine)
        return True

    async def _check_weights(self, engine: Engine) -> None:
        known = engine.label
        label, path = await engine.client.served_weights()
        if self._publisher.is_changing or engine.label != known:
            return  # weights are on their way, or arrived meanwhile: the answer may be old
        if self._pool.serving is None:
            await self._publisher.adopt(engine, label, path)
        load = await self._publisher.recognise(engine, label, path)
        if engine.label == label and engine.held == self._pool.serving:
            return
        if load is not None and load.state is LoadState.PENDING:
            return
        engine.label = engine.label or label
        # Weights that another replica proved may be newer than what is known here to be served.
        engine.needs_reload = load is None or load.state is not LoadState.PROVEN
        await self._reload(engine)

    async def _reload(self, engine: Engine) -> None:
        log.warning("engine.reload", engine_id=engine.engine_id, held=engine.label)
        try:
            await self._publisher.reload(engine)
        except (EngineError, Overloaded) as error:
            # It stays out until a reload succeeds; its health is still to be looked at.
            log.warning("engine.reload_failed", engine_id=engine.engine_id, error=str(error))
