"""Putting a new weight version on the engines: one first, proven by its logprobs, then the others.

On each engine: pause (running requests keep their tokens), load the folder and drop cached prefixes,
resume, then compare prompt logprobs with the publisher's. The comparison comes after the resume because a
paused engine answers nothing; what it generates meanwhile carries the new label, and if the comparison
fails that label is refused, so no such token becomes data. On a failure the engine loads the previous
folder; an engine where that fails too leaves routing until a full reload succeeds. The served version
moves only after the weights are in place. A change that began goes on to its end although whoever asked for
it left: half of one would leave engines paused.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from practicum.clock import Clock
from practicum.errors import CheckpointError, Conflict, EngineError, PracticumError
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Floats, Ids
from services.rollout.engine.generation import version_of
from services.rollout.engine.pool import Engine, EnginePool, Serving

log = get_logger("rollout.weights")

T = TypeVar("T")


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
    """Changes what the pool serves; one publication at a time.

    `on_takeover` is told a run whose weights are about to be, or have been, replaced by another's.
    """

    def __init__(
        self,
        pool: EnginePool,
        *,
        clock: Clock,
        save: Callable[[Serving], Awaitable[None]],
        on_takeover: Callable[[str], None] = lambda run_id: None,
        update_timeout_s: float = 120.0,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._save = save
        self._on_takeover = on_takeover
        self._update_timeout_s = update_timeout_s
        self.refused: set[tuple[str, int]] = set()  # (run, version) pairs that their probes spoke against
        self._proven: Serving | None = None  # the last that was compared with its publisher's probes
        self._lock = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def is_changing(self) -> bool:
        """Whether weights are on their way to engines."""
        return self._lock.locked()

    async def close(self) -> None:
        """Wait for changes that began; none is left half-way."""
        if self._changes:
            await asyncio.wait(self._changes)

    async def publish(self, publication: Publication) -> PublishReport:
        """Serve a version everywhere, or nowhere new.

        Raises `Conflict` for an older version without `rollback`, `CheckpointError` where the folder's
        manifest is not the published one, `EngineError` where no engine can be reached.
        """
        return await self._to_its_end(self._publish(publication))

    async def reload(self, engine: Engine) -> None:
        """Put the served weights on an engine that lost or never had them; `EngineError` where it cannot."""
        await self._to_its_end(self._reload(engine))

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

    async def _publish(self, publication: Publication) -> PublishReport:
        async with self._lock:
            serving = self._pool.serving
            engines = [engine for engine in self._pool.engines if engine.gate.is_open and engine.label]
            if serving is None or not engines:
                raise EngineError("no engine can be reached")
            is_proven = not publication.probes or serving == self._proven
            if is_proven and _is_served(serving, publication, engines):
                return self._report([_unchanged(engine) for engine in engines])
            _refuse_older(serving, publication)
            await asyncio.to_thread(check_manifest, Path(publication.path), publication.manifest_sha256)
            target = Serving(
                run_id=publication.run_id,
                weight_version=publication.weight_version,
                label=_unrefused(str(publication.weight_version), self._pool.engines),
                path=publication.path,
                manifest_sha256=publication.manifest_sha256,
            )
            return await self._roll_out(target, serving, publication, engines)

    async def _reload(self, engine: Engine) -> None:
        async with self._lock, engine.weights_lock:
            serving = self._pool.serving
            assert serving is not None
            await self._load(engine, serving)
            engine.needs_reload = False
        await self._pool.announce()

    async def _roll_out(
        self, target: Serving, previous: Serving, publication: Publication, engines: list[Engine]
    ) -> PublishReport:
        self._tell_takeover(previous, target)
        first, *others = sorted(engines, key=lambda engine: not engine.is_routable)
        results = [await self._update(first, target, previous, publication)]
        if results[0].ok:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._update(engine, target, previous=None, publication=publication))
                    for engine in others
                ]
            results += [task.result() for task in tasks]
            await self._save(target)
            self._pool.serving = target
            if publication.probes:
                self._proven = target
            self._tell_takeover(previous, target)  # the other run may have gone on meanwhile
            self.refused.discard((target.run_id, target.weight_version))
        elif results[0].max_logprob_diff > publication.tolerance:
            self.refused.add((target.run_id, target.weight_version))
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
        self, engine: Engine, target: Serving, previous: Serving | None, publication: Publication
    ) -> EngineResult:
        """Load and prove the target at one engine; on failure restore `previous`, or leave routing."""
        paused_s, diff = 0.0, 0.0
        async with engine.weights_lock:
            try:
                paused_s = await self._load(engine, target)
                diff = await _largest_diff(engine, publication.probes)
                if diff > publication.tolerance:
                    raise EngineError(f"logprobs differ by {diff:.3g}, tolerance {publication.tolerance:.3g}")
            except PracticumError as error:
                engine.refused_labels.add(target.label)
                engine.needs_reload = True
                if previous is not None:
                    paused_s += await self._restore(engine, previous)
                return EngineResult(
                    engine_id=engine.engine_id,
                    ok=False,
                    weight_version=engine.weight_version,
                    max_logprob_diff=diff,
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

    async def _load(self, engine: Engine, target: Serving) -> float:
        """Pause, load, resume; the seconds paused. A failed load leaves it paused: it may hold a mixture.

        Loaded under another name where this engine refused the target's: see `generation`.
        """
        label = _unrefused(target.label, [engine])
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
        return self._clock.monotonic() - paused_at_s

    async def _restore(self, engine: Engine, previous: Serving) -> float:
        try:
            paused_s = await self._load(engine, previous)
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


def _is_served(serving: Serving, publication: Publication, engines: list[Engine]) -> bool:
    same = (serving.run_id, serving.weight_version, serving.path, serving.manifest_sha256) == (
        publication.run_id,
        publication.weight_version,
        publication.path,
        publication.manifest_sha256,
    )
    return same and all(engine.held == serving and not engine.needs_reload for engine in engines)


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


def _unrefused(wanted: str, engines: Sequence[Engine]) -> str:
    """The label, or the next name of its version that none of these engines refused."""
    refused = set[str]().union(*(engine.refused_labels for engine in engines))
    label, retry = wanted, 0
    while label in refused:
        retry += 1
        label = f"{version_of(wanted)}.{retry}"
    return label


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
