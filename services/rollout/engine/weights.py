"""Putting a new weight version on the engines: one first, proven by its logprobs, then the others.

On each engine: put the load on record (see `records`), pause (running requests keep their tokens), load the
folder and drop cached prefixes, resume, then compare prompt logprobs with the publisher's. The comparison
comes after the resume because a paused engine answers nothing; what it generates meanwhile carries the load's
label, and is data only once the load is proven. On a failure the engine loads the previous folder; an engine
where that fails too leaves routing until a full reload succeeds. The served version moves only after the
weights are in place. A change that began goes on to its end although whoever asked for it left: half of one
would leave engines paused.

One replica at a time changes weights: the one with the lease. One that dies on the way leaves pending loads;
whoever has the lease next loads those engines anew.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from sqlalchemy.exc import SQLAlchemyError

from practicum.clock import Clock
from practicum.errors import CheckpointError, Conflict, EngineError, Overloaded, PracticumError
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Floats, Ids
from services.rollout.engine.generation import version_of
from services.rollout.engine.pool import Engine, EnginePool
from services.rollout.engine.records import Load, LoadState, Serving, WeightRecords, WeightsView

log = get_logger("rollout.weights")

T = TypeVar("T")

_LEASE_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """T token ids and the publisher's logprob of each given those before it; the first counts for nothing."""

    token_ids_T: Ids
    logprobs_T: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a trainer asks the engines to serve."""

    run_id: str
    weight_version: int
    path: str
    manifest_sha256: str = ""
    probes: tuple[Probe, ...] = ()
    tolerance: float = 0.0
    rollback: bool = False  # allow a version older than the one served


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """What one engine did."""

    engine_id: str
    ok: bool
    weight_version: int
    max_logprob_diff: float = 0.0
    paused_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """The result over all engines; `weight_version` is what is served now."""

    ok: bool
    engines: tuple[EngineResult, ...]
    weight_version: int


class WeightPublisher:
    """Changes what the pool serves, and follows what other replicas change; one change at a time.

    `on_takeover` is told a run whose weights are about to be, or have been, replaced by another's.
    `is_first` says whether this replica found no other when it came: then what the engines hold counts more
    than what was served last, since they may have been started with another model.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        records: WeightRecords,
        instance: str,
        clock: Clock,
        is_first: Callable[[], bool] = lambda: True,
        on_takeover: Callable[[str], None] = lambda run_id: None,
        update_timeout_s: float = 120.0,
        lease_wait_s: float = 5.0,
    ) -> None:
        self._pool = pool
        self._records = records
        self._instance = instance
        self._clock = clock
        self._is_first = is_first
        self._on_takeover = on_takeover
        self._update_timeout_s = update_timeout_s
        self._lease_wait_s = lease_wait_s
        self._fence = -1  # under which was served what the pool says is served
        self._lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def is_changing(self) -> bool:
        """Whether this replica has weights on their way to engines."""
        return self._lock.locked()

    def is_others(self, view: WeightsView) -> bool:
        """Whether another replica changes weights."""
        return view.holder not in ("", self._instance)

    async def close(self) -> None:
        """Wait for changes that began; none is left half-way."""
        if self._changes:
            await asyncio.wait(self._changes)

    async def refresh(self) -> WeightsView:
        """Read what is on record, and follow what another replica serves since."""
        view = await self._records.look()
        is_known = self._pool.serving is not None
        if view.serving is not None and view.fence > self._fence and (is_known or not self._is_first()):
            log.info("weights.followed", run_id=view.serving.run_id, version=view.serving.weight_version)
            await self._serve(view.serving, view.fence)
        if view.holder == self._instance and not self._lock.locked():
            # The record that it was given back was lost, and this replica lives: nobody else would get it.
            with suppress(Overloaded):
                async with self._lease(wait_s=0.0):
                    log.warning("weights.lease_found")
        return view

    async def is_refused(self, run_id: str, weight_version: int) -> bool:
        """Whether the version's probes spoke against it."""
        return await self._records.is_refused(run_id, weight_version)

    async def publish(self, publication: Publication) -> PublishReport:
        """Serve a version everywhere, or nowhere new.

        Raises `Conflict` for an older version without `rollback`, `CheckpointError` where the folder's
        manifest is not the published one, `EngineError` where no engine can be reached, `Overloaded` where
        another replica changes weights.
        """
        return await self._to_its_end(self._publish(publication))

    async def reload(self, engine: Engine) -> None:
        """Put the served weights on an engine that lost or never had them; `EngineError` where it cannot.

        `Overloaded` where another replica changes weights.
        """
        await self._to_its_end(self._reload(engine))

    async def meet(self, engine: Engine) -> None:
        """Let an engine go on that a process which died left paused; `Overloaded`, `EngineError`.

        One with a load that came to no end stays paused: it may hold a mixture, and is to be reloaded.
        """
        async with self._lease(wait_s=0.0):
            if engine.url not in (await self._records.look()).pending_urls:
                await engine.client.resume()

    async def adopt(self, engine: Engine, label: str, path: str) -> None:
        """Settle what is served where this replica does not know it yet; `Overloaded`, `EngineError`."""
        async with self._lease(wait_s=0.0) as fence:
            view = await self.refresh()
            if self._pool.serving is not None:
                return
            load = await self._pool.labels.now(label)
            stored = view.serving
            if stored is None or not _holds(engine, stored, label, path, load):
                stored = Serving(run_id="", weight_version=version_of(label), label=label, path=path)
                await self._records.serve(fence, stored, is_proven=False)
            await self._serve(stored, fence)

    async def recognise(self, engine: Engine, label: str, path: str) -> Load | None:
        """Note what an engine says that it holds, where that is what is served; the load behind it."""
        load = await self._pool.labels.now(label)
        serving = self._pool.serving
        if serving is not None and _holds(engine, serving, label, path, load):
            if load is None:
                engine.keeps(label, serving)
            elif engine.label != label:
                engine.holds(label, serving)
            engine.held = serving
            engine.needs_reload = False
        return load

    async def _to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        # A task of its own, held here: its caller's cancellation (a client that left) must not cut it off.
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_end)
            raise

    @asynccontextmanager
    async def _lease(self, *, wait_s: float) -> AsyncIterator[int]:
        """The right to change weights; `Overloaded` where another replica keeps it for longer."""
        async with self._lock:
            give_up_at_s = self._clock.monotonic() + wait_s
            while (fence := await self._records.take_lease(self._instance)) is None:
                if self._clock.monotonic() >= give_up_at_s:
                    raise Overloaded("another replica changes the weights", retry_after_s=1.0)
                await self._clock.sleep(_LEASE_POLL_S)
            try:
                yield fence
            finally:
                try:
                    await self._records.give_lease_back(fence)
                except SQLAlchemyError as error:
                    # This replica takes it again; another one, once this one is gone.
                    log.warning("weights.lease_kept", error=type(error).__name__)

    async def _serve(self, serving: Serving, fence: int) -> None:
        previous, self._pool.serving, self._fence = self._pool.serving, serving, fence
        if previous is not None:
            self._tell_takeover(previous, serving)
        await self._pool.announce()

    async def _publish(self, publication: Publication) -> PublishReport:
        async with self._lease(wait_s=self._lease_wait_s) as fence:
            view = await self.refresh()
            serving = self._pool.serving
            engines = [engine for engine in self._pool.engines if engine.gate.is_open and engine.label]
            # Where every engine waits for weights that cannot be loaded, these may be what saves them.
            engines = engines or [engine for engine in self._pool.engines if engine.needs_reload]
            if serving is None or not engines:
                raise EngineError("no engine can be reached")
            is_proven = not publication.probes or view.is_proven
            if is_proven and _is_same(serving, publication) and await self._all_hold(serving, engines):
                return self._report([_unchanged(engine) for engine in engines])
            _refuse_older(serving, publication)
            if not publication.probes:
                await self._refuse_refused(publication.run_id, publication.weight_version)
            await asyncio.to_thread(check_manifest, Path(publication.path), publication.manifest_sha256)
            target = Serving(
                run_id=publication.run_id,
                weight_version=publication.weight_version,
                path=publication.path,
                manifest_sha256=publication.manifest_sha256,
            )
            return await self._roll_out(fence, target, serving, publication, engines)

    async def _refuse_refused(self, run_id: str, weight_version: int) -> None:
        """Only probes may take back what probes said. Asked under the lease: nobody is just saying it."""
        if await self.is_refused(run_id, weight_version):
            raise EngineError(f"probes spoke against version {weight_version} of run {run_id!r}")

    async def _all_hold(self, serving: Serving, engines: list[Engine]) -> bool:
        for engine in engines:
            if engine.held != serving or engine.needs_reload:
                try:
                    await self.recognise(engine, *await engine.client.served_weights())
                except EngineError:
                    return False
        return all(engine.held == serving and not engine.needs_reload for engine in engines)

    async def _reload(self, engine: Engine) -> None:
        async with self._lease(wait_s=0.0) as fence, engine.weights_lock:
            view = await self.refresh()
            serving = self._pool.serving
            assert serving is not None
            if engine.url not in view.pending_urls:
                # Another replica may have been faster.
                await self.recognise(engine, *await engine.client.served_weights())
            if engine.url in view.pending_urls or engine.needs_reload or engine.held != serving:
                await self._refuse_refused(serving.run_id, serving.weight_version)
                load, _ = await self._load(fence, engine, serving)
                await self._conclude(fence, load, LoadState.PROVEN)
                engine.needs_reload = False
        await self._pool.announce()

    async def _roll_out(
        self, fence: int, target: Serving, previous: Serving, publication: Publication, engines: list[Engine]
    ) -> PublishReport:
        self._tell_takeover(previous, target)
        first, *others = sorted(engines, key=lambda engine: not engine.is_routable)
        results = [await self._update(fence, first, target, previous, publication)]
        if results[0].ok:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._update(fence, engine, target, None, publication))
                    for engine in others
                ]
            results += [task.result() for task in tasks]
            await self._records.serve(fence, target, is_proven=bool(publication.probes))
            # Told again of a takeover: the other run may have gone on meanwhile.
            await self._serve(target, fence)
        await self._pool.announce()
        log.info(
            "weights.published" if results[0].ok else "weights.refused",
            run_id=target.run_id,
            weight_version=target.weight_version,
            engines=len(engines),
            failed=sum(not result.ok for result in results),
            paused_s=max(result.paused_s for result in results),
            max_logprob_diff=max(result.max_logprob_diff for result in results),
        )
        return self._report(results)

    def _tell_takeover(self, previous: Serving, target: Serving) -> None:
        if previous.run_id not in ("", target.run_id):
            self._on_takeover(previous.run_id)

    async def _update(
        self,
        fence: int,
        engine: Engine,
        target: Serving,
        previous: Serving | None,
        publication: Publication,
    ) -> EngineResult:
        """Load and prove the target at one engine; on failure restore `previous`, or leave routing."""
        paused_s, diff = 0.0, 0.0
        async with engine.weights_lock:
            try:
                load, paused_s = await self._load(fence, engine, target)
                diff = await self._proof(fence, engine, load, publication)
            except PracticumError as error:
                engine.needs_reload = True
                if previous is not None:
                    paused_s += await self._restore(fence, engine, previous)
                return EngineResult(
                    engine_id=engine.engine_id,
                    ok=False,
                    weight_version=engine.weight_version,
                    max_logprob_diff=error.diff if isinstance(error, _ProbesDiffer) else diff,
                    paused_s=paused_s,
                    error=str(error),
                )
            engine.needs_reload = False
        return EngineResult(
            engine_id=engine.engine_id,
            ok=True,
            weight_version=engine.weight_version,
            max_logprob_diff=diff,
            paused_s=paused_s,
        )

    async def _proof(self, fence: int, engine: Engine, load: Load, publication: Publication) -> float:
        """Settle a load by its probes; the largest difference. Raises where it is not proven."""
        try:
            diff = await _largest_diff(engine, publication.probes)
        except PracticumError:
            await self._conclude(fence, load, LoadState.FAILED)
            raise
        if diff > publication.tolerance:
            await self._conclude(fence, load, LoadState.REFUSED)
            raise _ProbesDiffer(diff, publication.tolerance)
        await self._conclude(fence, load, LoadState.PROVEN)
        return diff

    async def _load(self, fence: int, engine: Engine, target: Serving) -> tuple[Load, float]:
        """Pause, load, resume; the load, still pending, and the seconds paused.

        A failed load leaves the engine paused and the load pending: it may hold a mixture.
        """
        label = await self._records.begin_load(fence, engine.url, target)
        paused_at_s = self._clock.monotonic()
        try:
            await engine.client.pause()
            engine.meter.set_paused(True)
            await engine.client.update_weights(target.path, label, timeout_s=self._update_timeout_s)
            engine.holds(label, target)
            await engine.client.resume()
        except BaseException:
            engine.needs_reload = True
            raise
        engine.meter.set_paused(False)
        load = Load(label=label, engine_url=engine.url, weights=target, state=LoadState.PENDING)
        return load, self._clock.monotonic() - paused_at_s

    async def _conclude(self, fence: int, load: Load, state: LoadState) -> None:
        await self._records.conclude(fence, load.label, state)
        self._pool.labels.settle(load, state)

    async def _restore(self, fence: int, engine: Engine, previous: Serving) -> float:
        try:
            await self._refuse_refused(previous.run_id, previous.weight_version)
            load, paused_s = await self._load(fence, engine, previous)
            await self._conclude(fence, load, LoadState.PROVEN)
        except EngineError as error:
            log.error("weights.restore_failed", engine_id=engine.engine_id, error=str(error))
            return 0.0
        engine.needs_reload = False
        return paused_s

    def _report(self, results: list[EngineResult]) -> PublishReport:
        assert self._pool.serving is not None
        return PublishReport(
            ok=all(result.ok for result in results),
            engines=tuple(results),
            weight_version=self._pool.serving.weight_version,
        )


class _ProbesDiffer(EngineError):
    """The engine's logprobs are not the publisher's."""

    def __init__(self, diff: float, tolerance: float) -> None:
        super().__init__(f"logprobs differ by {diff:.3g}, tolerance {tolerance:.3g}")
        self.diff = diff


def check_manifest(folder: Path, manifest_sha256: str) -> None:
    """Raise `CheckpointError` where the folder's manifest is not the one that was published.

    A folder that this process cannot see passes: engines on other machines may have it mounted.
    """
    manifest = folder / "manifest.json"
    if not manifest_sha256 or not manifest.exists():
        return
    found = hashlib.sha256(manifest.read_bytes()).hexdigest()
    if found != manifest_sha256:
        raise CheckpointError(f"{manifest} has SHA-256 {found}, published was {manifest_sha256}")


def _holds(engine: Engine, weights: Serving, label: str, path: str, load: Load | None) -> bool:
    """Whether an engine that names its weights so holds these."""
    if load is not None:
        return load.state is LoadState.PROVEN and load.weights == weights and load.engine_url == engine.url
    return label != "" and (weights.label, weights.path) == (label, path)


def _is_same(serving: Serving, publication: Publication) -> bool:
    return (serving.run_id, serving.weight_version, serving.path, serving.manifest_sha256) == (
        publication.run_id,
        publication.weight_version,
        publication.path,
        publication.manifest_sha256,
    )


def _refuse_older(serving: Serving, publication: Publication) -> None:
    if publication.rollback or publication.run_id != serving.run_id:
        return
    if publication.weight_version < serving.weight_version:
        raise Conflict(
            f"version {serving.weight_version} is served; version {publication.weight_version} is older "
            "and rollback is not set"
        )


def _unchanged(engine: Engine) -> EngineResult:
    return EngineResult(engine_id=engine.engine_id, ok=True, weight_version=engine.weight_version)


def _log_end(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("weights.change_failed", error=str(error))


async def _largest_diff(engine: Engine, probes: tuple[Probe, ...]) -> float:
    diff = 0.0
    for probe in probes:
        served_T = await engine.client.score(probe.token_ids_T)
        if len(served_T) > 1:
            found = float(np.abs(served_T[1:] - probe.logprobs_T[1:]).max())
            diff = max(diff, found if math.isfinite(found) else math.inf)
    return diff
