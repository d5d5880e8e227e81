"""One run while it trains: from the last committed step to the end, or to where it is held.

Owns the order of things that makes a step exactly once: compute, write the folder, commit in SQL,
acknowledge, publish. A crash between any two of them leaves a state that `_open` understands: what
SQL says is true, other folders are removed, entries of committed steps are acknowledged again and
everything else is trained again from the weights that survived.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from practicum.clock import Clock
from practicum.errors import CheckpointError, Conflict, PracticumError
from practicum.queue import Queue
from practicum.telemetry.logs import get_logger
from services.trainer.checkpoints.folders import (
    STATE_FOLDER,
    CheckpointFolders,
    WrittenCheckpoint,
    copy_model,
    versions_to_retire,
)
from services.trainer.checkpoints.manifest import verify_folder
from services.trainer.checkpoints.publish import Publication, Publisher, ScoredProbe, Send
from services.trainer.compute import ComputeThread
from services.trainer.events import Events
from services.trainer.intake.groups import Group
from services.trainer.intake.intake import Intake
from services.trainer.intake.verify import Expectations
from services.trainer.megatron.backend import MegatronBackend
from services.trainer.metrics import TrainerMetrics
from services.trainer.progress import Phase, ProgressBoard
from services.trainer.report import step_metrics
from services.trainer.spec import Precision, RunState, Stage
from services.trainer.step import StepOutcome, run_step
from services.trainer.store import TrainerStore
from services.trainer.store.records import CheckpointRecord, ConsumedEpisode, RunRecord

log = get_logger("trainer.session")

POLL_S = 0.5
PROBE_TOKENS = 64
NUM_PROBES = 2
EXPORT_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16"}
# Engines compute in another order than the trainer; in bf16 that alone moves a logprob by up to 0.6.
PUBLISH_TOLERANCES = {Precision.FP32: 0.05, Precision.BF16: 1.0}


class NothingToTrain(PracticumError):
    """Batch after batch came without one usable trajectory."""

    code = "nothing_to_train"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What every session is made of."""

    store: TrainerStore
    queue: Queue
    compute: ComputeThread
    metrics: TrainerMetrics
    progress: ProgressBoard
    clock: Clock
    events: Events
    load_backend: Callable[..., MegatronBackend]
    send: Send | None  # None = there is no rollout service to publish to
    consumer: str
    checkpoint_root: Path
    keep_checkpoints: int
    unusable_batches: int
    first_retry_s: float
    checkpoint_patience_s: float
    publish_patience_s: float
    publish_tolerance: float | None  # None = by precision
    reward_low: float
    reward_high: float


class RunSession:
    """A run that holds the trainer."""

    def __init__(self, parts: SessionParts, run: RunRecord) -> None:
        self._parts = parts
        self._run_id = run.run_id
        self._spec = run.spec
        self._version = run.weight_version
        self._folders = CheckpointFolders(parts.checkpoint_root, run.run_id)
        self._publisher = self._new_publisher()
        self._num_unusable = 0
        self._backend: MegatronBackend
        self.intake: Intake | None = None  # None = not open yet

    @property
    def run_id(self) -> str:
        """The run."""
        return self._run_id

    @property
    def version(self) -> int:
        """The last committed version."""
        return self._version

    async def train(self, stop: asyncio.Event) -> None:
        """Train until the run is done, held, over, or the service stops."""
        intake = await self._open()
        try:
            async with _in_background(self._publisher.run()):
                while self._version < self._spec.num_steps:
                    groups, wait_s = await self._wait_for_groups(intake, stop)
                    if not groups:
                        return
                    if any(group.usable for group in groups):
                        await self._step(intake, groups, wait_s, stop)
                    else:
                        await self._discard(intake, groups)
                await self._finish(intake, stop)
        finally:
            await self._parts.compute.run(self._backend.close)

    async def make_ready(self, stop: asyncio.Event) -> bool:
        """Commit the base and have it served, for a run that is held; False where it is not served yet."""
        await self._open()
        try:
            async with _in_background(self._publisher.run()):
                return await self._until_served(stop, while_in=RunState.PAUSED)
        finally:
            await self._parts.compute.run(self._backend.close)

    # Opening

    async def _open(self) -> Intake:
        """Bring folders, weights and stream to where SQL says the run is."""
        parts = self._parts
        parts.progress.enter(self._run_id, Phase.LOADING)
        kept = await parts.store.checkpoints.kept(self._run_id)
        removed = await parts.compute.run(self._folders.recover, [held.weight_version for held in kept])
        if removed:
            log.info("checkpoint.leftovers_removed", run_id=self._run_id, names=removed)
        checkpoint = kept[-1] if kept else await self._commit_base()
        self._version = checkpoint.weight_version
        self._backend = await parts.compute.run(self._load, checkpoint)
        self.intake = intake = self._new_intake()
        num_owed = await intake.recover(self._version)
        log.info("run.opened", run_id=self._run_id, weight_version=self._version, entries_owed=num_owed)
        await self._offer(checkpoint, ())
        return intake

    async def _commit_base(self) -> CheckpointRecord:
        source = Path(self._spec.model_path)
        written = await self._parts.compute.run(
            self._folders.write, 0, lambda folder: copy_model(source, folder)
        )
        return await self._parts.store.runs.commit_base(self._run_id, written)

    def _load(self, checkpoint: CheckpointRecord) -> MegatronBackend:
        folder = Path(checkpoint.path)
        verify_folder(folder, manifest_sha256=checkpoint.manifest_sha256)
        # The reference of a KL term is the base, whatever was trained since.
        source = self._folders.folder_of(0) if self._spec.keeps_reference else folder
        backend = self._parts.load_backend(
            source,
            optimizer=self._spec.optimizer_config(),
            precision=self._spec.precision.value,
            seed=self._spec.seed,
            microbatch_tokens=self._spec.microbatch_tokens,
            keep_reference=self._spec.keeps_reference,
        )
        # Absent until an optimizer step was taken; the manifest tells a lost one from that.
        if (folder / STATE_FOLDER).is_dir():
            backend.load_state(folder / STATE_FOLDER)
        return backend

    def _new_intake(self) -> Intake:
        parts, spec = self._parts, self._spec
        return Intake(
            queue=parts.queue,
            store=parts.store,
            metrics=parts.metrics,
            clock=parts.clock,
            consumer=parts.consumer,
            expected=Expectations(
                run_id=self._run_id,
                group_size=spec.group_size,
                vocab_size=self._backend.vocab_size,
                max_row_tokens=spec.microbatch_tokens,
                temperature=spec.temperature if spec.stage is Stage.RL else None,
                reward_low=parts.reward_low,
                reward_high=parts.reward_high,
            ),
        )

    def _new_publisher(self) -> Publisher:
        parts = self._parts
        return Publisher(
            run_id=self._run_id,
            send=parts.send,
            store=parts.store,
            metrics=parts.metrics,
            events=parts.events,
            clock=parts.clock,
            tolerance=parts.publish_tolerance or PUBLISH_TOLERANCES[self._spec.precision],
            first_retry_s=parts.first_retry_s,
        )

    # Stepping

    async def _wait_for_groups(self, intake: Intake, stop: asyncio.Event) -> tuple[tuple[Group, ...], float]:
        """The groups of the next step and the seconds they took; () where the run is not to go on."""
        parts, needed = self._parts, self._spec.groups_per_step
        started_s = parts.clock.monotonic()
        while not stop.is_set() and await self._is_running():
            groups = intake.take(needed)
            if groups:
                return groups, parts.clock.monotonic() - started_s
            parts.progress.enter(self._run_id, Phase.WAITING)
            parts.progress.count_groups(
                self._run_id, complete=intake.num_complete, partial=intake.num_partial, needed=needed
            )
            await intake.poll(POLL_S)
        return (), 0.0

    async def _is_running(self) -> bool:
        return (await self._parts.store.runs.get(self._run_id)).state is RunState.RUNNING

    async def _step(
        self, intake: Intake, groups: Sequence[Group], wait_s: float, stop: asyncio.Event
    ) -> None:
        parts = self._parts
        parts.progress.enter(self._run_id, Phase.TRAINING)
        outcome = await parts.compute.run(
            run_step, self._backend, groups, self._spec, weight_version=self._version
        )
        parts.progress.enter(self._run_id, Phase.COMMITTING)
        started_s = parts.clock.monotonic()
        written = await self._write(outcome, stop)
        if written is None:
            return
        metrics = step_metrics(outcome, wait_s=wait_s, commit_s=parts.clock.monotonic() - started_s)
        try:
            checkpoint = await parts.store.runs.commit_step(
                self._run_id,
                written=written,
                episodes=_episodes_of(groups),
                num_groups=len(groups),
                metrics=metrics,
            )
        except Conflict:
            # The run was stopped while the step ran: the step never happened.
            await parts.compute.run(self._folders.remove, written.weight_version)
            return
        self._version = intake.weight_version = written.weight_version
        self._num_unusable = 0
        # Ack after commit: a crash between must redeliver, and the redelivery is known as consumed.
        await intake.acknowledge(groups)
        await self._offer(checkpoint, groups)
        await parts.events.step_committed(self._run_id, self._version)
        await self._retire()
        self._count(outcome, metrics, written)

    async def _write(self, outcome: StepOutcome, stop: asyncio.Event) -> WrittenCheckpoint | None:
        """The next version's folder; waits out a disk that refuses. None where the run is held meanwhile."""
        parts, version = self._parts, self._version + 1
        deadline_s = parts.clock.monotonic() + parts.checkpoint_patience_s
        retry_s = parts.first_retry_s
        while True:
            try:
                if not outcome.result.updated:
                    return await parts.compute.run(self._folders.link, version, self._version)
                return await parts.compute.run(self._folders.write, version, self._export)
            except CheckpointError as error:
                if parts.clock.monotonic() >= deadline_s:
                    raise
                log.warning("checkpoint.write_failed", run_id=self._run_id, error=str(error))
                parts.progress.enter(self._run_id, Phase.COMMITTING, problem=str(error))
            await parts.clock.sleep(retry_s)
            if stop.is_set() or not await self._may_commit():
                return None
            retry_s = min(retry_s * 2, 30.0)

    async def _may_commit(self) -> bool:
        state = (await self._parts.store.runs.get(self._run_id)).state
        return state in (RunState.RUNNING, RunState.PAUSED)

    def _export(self, folder: Path) -> None:
        self._backend.export(folder, dtype=EXPORT_DTYPES[self._spec.precision])
        self._backend.save_state(folder / STATE_FOLDER)

    async def _discard(self, intake: Intake, groups: Sequence[Group]) -> None:
        """Take a batch without one usable trajectory out of the way; fail the run after too many."""
        parts = self._parts
        await parts.store.runs.discard_batch(
            self._run_id, episodes=_episodes_of(groups), num_groups=len(groups)
        )
        await intake.acknowledge(groups)
        self._num_unusable += 1
        errors = [arrival.trajectory.error for group in groups for arrival in group.arrivals]
        reason = next((error for error in errors if error), "see the run's quarantine")
        log.warning(
            "batch.discarded", run_id=self._run_id, num_groups=len(groups), in_a_row=self._num_unusable
        )
        if self._num_unusable >= parts.unusable_batches:
            raise NothingToTrain(
                f"{self._num_unusable} batches in a row held no usable trajectory; the last said: {reason}"
            )
        problem = f"a batch of {len(groups)} groups held no usable trajectory: {reason}"
        parts.progress.enter(self._run_id, Phase.RETRYING, problem=problem)
        await parts.clock.sleep(min(parts.first_retry_s * 2 ** (self._num_unusable - 1), 30.0))

    def _count(self, outcome: StepOutcome, metrics: dict[str, Any], written: WrittenCheckpoint) -> None:
        counters = self._parts.metrics
        counters.steps.labels(updated=str(outcome.result.updated).lower()).inc()
        counters.step_seconds.observe(outcome.result.seconds)
        counters.wait_seconds.observe(metrics["wait_s"])
        counters.commit_seconds.observe(metrics["commit_s"])
        counters.tokens_trained.inc(outcome.result.num_tokens_trained)
        counters.checkpoint_bytes.set(written.size_bytes)
        log.info(
            "step.committed",
            run_id=self._run_id,
            step=self._version,
            loss=metrics["loss"],
            reward_mean=metrics["reward_mean"],
            zero_variance_groups=metrics["zero_variance_groups"],
            tokens_trained=metrics["tokens_trained"],
            seconds=metrics["seconds"],
            wait_s=metrics["wait_s"],
            commit_s=metrics["commit_s"],
        )

    # Publishing and the end

    async def _offer(self, checkpoint: CheckpointRecord, groups: Sequence[Group]) -> None:
        """Hand a version to the publisher. Of a demonstration run only the last one is worth serving."""
        is_last = checkpoint.weight_version >= self._spec.num_steps
        if self._parts.send is None or (self._spec.stage is Stage.SFT and not is_last):
            return
        probes = await self._parts.compute.run(_score_probes, self._backend, groups)
        self._publisher.offer(
            Publication(
                weight_version=checkpoint.weight_version,
                path=checkpoint.path,
                manifest_sha256=checkpoint.manifest_sha256,
                probes=probes,
            )
        )

    async def _retire(self) -> None:
        parts = self._parts
        kept = await parts.store.checkpoints.kept(self._run_id)
        run = await parts.store.runs.get(self._run_id)
        protected = set(self._publisher.versions_in_use)
        if run.published_version is not None:
            protected.add(run.published_version)  # where a failed publish rolls back to
        if self._spec.keeps_reference:
            protected.add(0)
        doomed = versions_to_retire(
            [held.weight_version for held in kept], keep_last=parts.keep_checkpoints, protected=protected
        )
        if doomed:
            await parts.store.checkpoints.retire(self._run_id, doomed)
            for version in doomed:
                await parts.compute.run(self._folders.remove, version)

    async def _until_served(self, stop: asyncio.Event, *, while_in: RunState) -> bool:
        """Wait for the newest version to be served; False where something else ends first."""
        parts = self._parts
        parts.progress.enter(self._run_id, Phase.PUBLISHING)
        deadline_s = parts.clock.monotonic() + parts.publish_patience_s
        while not await self._publisher.settled(POLL_S):
            state = (await parts.store.runs.get(self._run_id)).state
            if stop.is_set() or state is not while_in or parts.clock.monotonic() >= deadline_s:
                return False
        return True

    async def _finish(self, intake: Intake, stop: asyncio.Event) -> None:
        parts = self._parts
        if not await self._until_served(stop, while_in=RunState.RUNNING):
            if stop.is_set() or not await self._is_running():
                return
            log.warning("run.finished_unpublished", run_id=self._run_id, weight_version=self._version)
            await parts.store.runs.note_unpublished(
                self._run_id, f"not served within {parts.publish_patience_s:g} s, and given up"
            )
        await self._retire()  # what was still served while the last steps were taken
        await parts.store.runs.change_state(
            self._run_id, RunState.COMPLETED, allowed={RunState.RUNNING}, already=frozenset(RunState)
        )
        await intake.drop_all()
        log.info("run.completed", run_id=self._run_id, steps=self._version)


def _episodes_of(groups: Sequence[Group]) -> list[ConsumedEpisode]:
    return [
        ConsumedEpisode(
            episode_id=arrival.trajectory.episode_id,
            trajectory_id=arrival.trajectory.trajectory_id,
            attempt=arrival.trajectory.attempt,
            group_id=group.group_id,
            task_id=arrival.trajectory.task_id,
            trained=arrival.usable,
            reward=arrival.trajectory.reward if arrival.usable else None,
        )
        for group in groups
        for arrival in group.arrivals
    ]


def _score_probes(backend: MegatronBackend, groups: Sequence[Group]) -> tuple[ScoredProbe, ...]:
    """Beginnings of rows that were just trained, or of noise where there are none, with our logprobs."""
    rows = [row.token_ids_T for group in groups for trajectory in group.usable for row in trajectory.rows]
    ids_by_row = [ids_T[:PROBE_TOKENS] for ids_T in rows[:NUM_PROBES]]
    if not ids_by_row:
        noise = np.random.default_rng(0)
        ids_by_row = [noise.integers(0, backend.vocab_size, size=PROBE_TOKENS, dtype=np.int32)]
    scored = backend.score(ids_by_row, temperature=1.0)
    return tuple(
        ScoredProbe(token_ids_T=ids_T, logprobs_T=logprobs_T)
        for ids_T, logprobs_T in zip(ids_by_row, scored, strict=True)
    )


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the body; its error ends the body, and the body's end cancels it."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        try:
            yield
        finally:
            task.cancel()
