"""The engines that may be used now, and which one takes a request.

Owns routing (a session or group stays at one engine, so that its prefix cache is used), the bound on
requests at one engine, and this replica's copy of what is served. Never changes weights (see `weights`) or
health (see `keeper`). Invariants: an engine outside routing gets no new request; a generation is data only
where every load that sampled it is proven, and of the run that it is for; `serving` moves only after the
weights are in place.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace

from practicum.clock import Clock
from practicum.errors import EngineError
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Ids, SamplingParams
from services.rollout.engine.client import EngineClient, EngineUnreachable
from services.rollout.engine.generation import Generation, version_of
from services.rollout.engine.health import HealthGate
from services.rollout.engine.labels import LabelBook
from services.rollout.engine.meter import SlotMeter, Usage
from services.rollout.engine.records import Load, LoadState, Serving

log = get_logger("rollout.engine")

_MAX_AFFINITIES = 4096
_ABORT_DEADLINE_S = 2.0
_MAX_SENDS = 4  # times a request is sent where each engine it came to was gone


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
        # The last changes of its weights: (label, run) where it came with what was served, None for a load.
        # So a generation that began before a load is known by the old name, one of long after is not.
        self.startups: deque[tuple[str, str] | None] = deque(maxlen=4)

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

    @property
    def url(self) -> str:
        """Its address, by which the replicas know it."""
        return self.client.base_url

    def holds(self, label: str, held: Serving) -> None:
        """Record what was loaded on it."""
        self.label = label
        self.held = held
        self.startups.append(None)

    def keeps(self, label: str, held: Serving) -> None:
        """Record that what it started with is what is served."""
        self.label = label
        self.held = held
        if (label, held.run_id) not in self.startups:
            self.startups.append((label, held.run_id))


class EnginePool:
    """Every engine of the service."""

    def __init__(
        self, engines: Sequence[Engine], *, labels: LabelBook, clock: Clock, route_wait_s: float = 120.0
    ) -> None:
        self.engines = tuple(engines)
        self.labels = labels
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
        run_id: str = "",
    ) -> Generation:
        """Sample one turn at the engine of `affinity`. Raises `EngineError`, or `InvalidInput` for bad ids.

        With a `run_id`, weights of another run are an error: versions of two runs have the same numbers.
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
        for label in generation.labels:
            await self._check_label(engine, label, run_id)
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

    async def _check_label(self, engine: Engine, label: str, run_id: str) -> None:
        if not self.labels.knows(label):
            owners = [startup[1] for startup in engine.startups if startup and startup[0] == label]
            if owners and (not run_id or run_id in owners):
                return
        load = await self.labels.verdict(label)
        if load is None or load.engine_url != engine.url:
            engine.needs_reload = True  # it restarted: its weights are not those that were put there
            raise EngineError(f"{engine.engine_id} serves {label!r} where {engine.label!r} was loaded")
        if load.state is not LoadState.PROVEN:
            raise EngineError(f"{engine.engine_id} sampled with {load.state} weights {label!r}")
        if run_id and load.weights.run_id != run_id:
            raise EngineError(f"{engine.engine_id} sampled with weights of {_whose(load)}")


def _whose(load: Load) -> str:
    return f"run {load.weights.run_id}" if load.weights.run_id else "no run"
