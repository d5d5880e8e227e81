"""The engines that may be used now, and which one takes a request.

Owns routing (a session or group stays at one engine, so that its prefix cache is used), the bound on
requests at one engine, and the record of what is served. Never changes weights (see `weights`) or health
(see `keeper`). Invariants: an engine outside routing gets no new request; a generation that holds a token
of refused weights is an error, never data; `serving` moves only after the weights are in place.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from practicum.clock import Clock
from practicum.errors import EngineError
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Ids, SamplingParams
from services.rollout.engine.client import EngineClient, EngineUnreachable
from services.rollout.engine.generation import Generation, version_of
from services.rollout.engine.health import HealthGate
from services.rollout.engine.meter import SlotMeter, Usage

log = get_logger("rollout.engine")

_MAX_AFFINITIES = 4096
_ABORT_DEADLINE_S = 2.0
_MAX_SENDS = 4  # times a request is sent where each engine it came to was gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One set of weights and where it lies."""

    run_id: str  # empty for the model the engines started with
    weight_version: int
    label: str
    path: str
    manifest_sha256: str = ""


class Engine:
    """One engine with everything this service knows about it."""

    def __init__(self, client: EngineClient, *, num_slots: int, clock: Clock) -> None:
        self.client = client
        self.num_slots = num_slots
        self.meter = SlotMeter(slots=num_slots, clock=clock)
        self.gate = HealthGate()
        self.slots = asyncio.Semaphore(num_slots)
        self.num_waiting = 0
        self.weights_lock = asyncio.Lock()  # one change of weights at a time
        self.label = ""  # its name for the weights it is known to hold; empty until asked
        self.held: Serving | None = None  # those weights; None = not ones that this service served
        self.needs_reload = False
        self.recent_labels: deque[str] = deque(maxlen=4)
        self.refused_labels: set[str] = set()

    @property
    def engine_id(self) -> str:
        """The name in version spans."""
        return self.client.engine_id

    @property
    def is_routable(self) -> bool:
        """Whether it may get requests."""
        return self.gate.is_open and bool(self.label) and not self.needs_reload

    @property
    def weight_version(self) -> int:
        """The version it holds; -1 where nobody asked it yet."""
        return version_of(self.label) if self.label else -1

    @property
    def load(self) -> float:
        """Requests at it or waiting for it, a slot."""
        return (self.meter.num_in_flight + self.num_waiting) / self.num_slots

    def holds(self, label: str, held: Serving | None = None) -> None:
        """Record what it serves from now on; `label` is not `held.label` where it refused that name."""
        self.label = label
        self.held = held
        self.recent_labels.append(label)


class EnginePool:
    """Every engine of the service."""

    def __init__(self, engines: Sequence[Engine], *, clock: Clock, route_wait_s: float = 120.0) -> None:
        self.engines = tuple(engines)
        self.serving: Serving | None = None  # None = no engine has been reached yet
        self._clock = clock
        self._route_wait_s = route_wait_s
        self._affinity: OrderedDict[str, Engine] = OrderedDict()
        self._changed = asyncio.Condition()

    @property
    def num_slots(self) -> int:
        """Requests that all engines together take at once."""
        return sum(engine.num_slots for engine in self.engines)

    def usage(self) -> dict[str, Usage]:
        """Readings by engine id."""
        return {engine.engine_id: engine.meter.read() for engine in self.engines}

    async def announce(self) -> None:
        """Wake requests that wait for an engine; called after routing or serving changed."""
        async with self._changed:
            self._changed.notify_all()

    async def generate(
        self,
        prompt_ids_T: Ids,
        *,
        request_id: str,
        affinity: str,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Generation:
        """Sample one turn at the engine of `affinity`. Raises `EngineError`, or `InvalidInput` for bad ids.

        `timeout_s` counts from the moment a slot is free; a request that is cancelled or late is aborted
        at the engine, so that it does not go on there for nobody. An engine that turns out to be gone leaves
        routing, and the request goes to another, or waits for one.
        """
        asked_at_s = self._clock.monotonic()
        for num_sends in range(1, _MAX_SENDS + 1):
            engine = await self._take_slot(affinity)
            started_at_s = self._clock.monotonic()
            try:
                generation = await self._generate_in_slot(
                    engine, prompt_ids_T, request_id, sampling, stop_token_ids, timeout_s
                )
                break
            except EngineUnreachable as error:
                if engine.gate.is_open:
                    log.warning("engine.gone", engine_id=engine.engine_id, error=str(error))
                engine.gate.close()
                if num_sends == _MAX_SENDS:
                    raise
        self._check_labels(engine, generation)
        return replace(
            generation,
            generation_s=self._clock.monotonic() - started_at_s,
            waiting_s=started_at_s - asked_at_s,
        )

    async def _take_slot(self, affinity: str) -> Engine:
        """A slot at an engine that is usable at the moment the slot is taken."""
        while True:
            engine = await self._route(affinity)
            engine.num_waiting += 1
            try:
                await engine.slots.acquire()
            finally:
                engine.num_waiting -= 1
            if engine.is_routable:
                return engine
            engine.slots.release()

    async def _generate_in_slot(
        self,
        engine: Engine,
        prompt_ids_T: Ids,
        request_id: str,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Generation:
        num_tokens = 0
        engine.meter.enter()
        try:
            generation = await self._generate_at(
                engine, prompt_ids_T, request_id, sampling, stop_token_ids, timeout_s
            )
            num_tokens = len(generation.token_ids_T)
        finally:
            engine.meter.leave(num_tokens)
            engine.slots.release()
        return generation

    async def _generate_at(
        self,
        engine: Engine,
        prompt_ids_T: Ids,
        request_id: str,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Generation:
        try:
            return await engine.client.generate(
                prompt_ids_T,
                request_id=request_id,
                sampling=sampling,
                stop_token_ids=stop_token_ids,
                timeout_s=timeout_s,
            )
        except (EngineError, asyncio.CancelledError):
            try:
                async with asyncio.timeout(_ABORT_DEADLINE_S):
                    await engine.client.abort(request_id)
            except (EngineError, TimeoutError):
                log.warning("engine.abort_failed", engine_id=engine.engine_id, request_id=request_id)
            raise

    async def _route(self, affinity: str) -> Engine:
        engine = self._choose(affinity)
        if engine is not None:
            return engine
        try:
            async with asyncio.timeout(self._route_wait_s), self._changed:
                while (engine := self._choose(affinity)) is None:
                    await self._changed.wait()
                return engine
        except TimeoutError:
            raise EngineError(f"no engine could be used for {self._route_wait_s} s") from None

    def _choose(self, affinity: str) -> Engine | None:
        known = self._affinity.get(affinity)
        if known is not None and known.is_routable:
            self._affinity.move_to_end(affinity)
            return known
        usable = [engine for engine in self.engines if engine.is_routable]
        if not usable:
            return None
        chosen = min(usable, key=lambda engine: engine.load)
        self._affinity[affinity] = chosen
        if len(self._affinity) > _MAX_AFFINITIES:
            self._affinity.popitem(last=False)
        return chosen

    def _check_labels(self, engine: Engine, generation: Generation) -> None:
        if refused := engine.refused_labels & set(generation.labels):
            raise EngineError(f"{engine.engine_id} sampled with refused weights {sorted(refused)}")
        if generation.labels and generation.labels[-1] not in engine.recent_labels:
            engine.needs_reload = True  # it restarted: its weights are not those this service put there
            raise EngineError(
                f"{engine.engine_id} serves {generation.labels[-1]!r} where {engine.label!r} was loaded"
            )
