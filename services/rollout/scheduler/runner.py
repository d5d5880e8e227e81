"""Plays an episode to its end: attempts, their record in SQL, and what is sent on.

A platform failure is tried again, after a wait, up to `max_failures` times in this process; a policy's
failure never is. An attempt's end is committed before anything is sent, so that what was sent can be sent
again. Whoever lost the compare-and-set on the state (a cancel, a newer attempt) sends nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from practicum.clock import Clock
from practicum.errors import PracticumError
from practicum.queue.base import Queue
from practicum.queue.streams import GRADING, trajectories
from practicum.telemetry.logs import get_logger
from practicum.trajectory import Outcome
from practicum.wire import trajectory_to_pb
from services.rollout.chat import ChatTemplate
from services.rollout.episode.loop import EpisodeRecord, EpisodeSpec, run_episode, unplayed
from services.rollout.episode.policy import Policy
from services.rollout.episode.sandbox import Sandboxes
from services.rollout.metrics import Metrics
from services.rollout.rpc.sandboxes import ToolCatalogue
from services.rollout.rpc.taskspec import grade_request
from services.rollout.store.episodes import Ending, EpisodeState, EpisodeStore

log = get_logger("rollout.episode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The budget for platform failures of one episode."""

    max_failures: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 10.0
    attempt_deadline_s: float = 600.0  # a hanging attempt is a platform failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An episode to be played."""

    spec: EpisodeSpec
    make_policy: Callable[[], Policy]  # a fresh one for each attempt
    is_graded: bool  # False: a demonstration, sent to the trainer as it is


class EpisodeRunner:
    """Plays episodes; safe to use from many tasks at once."""

    def __init__(
        self,
        *,
        store: EpisodeStore,
        queue: Queue,
        sandboxes: Sandboxes,
        catalogue: ToolCatalogue,
        chat: ChatTemplate,
        clock: Clock,
        random: Random,
        retry: Retry,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._queue = queue
        self._sandboxes = sandboxes
        self._catalogue = catalogue
        self._chat = chat
        self._clock = clock
        self._random = random
        self._retry = retry
        self._metrics = metrics
        self._live: dict[str, asyncio.Task[None]] = {}
        self._sent: list[str] = []

    @property
    def num_live(self) -> int:
        """Episodes being played now."""
        return len(self._live)

    async def play(self, job: Job, *, is_restart: bool = False) -> None:
        """Play to the end of the episode. Raises nothing but a cancellation from outside.

        `is_restart`: the job's attempt may have begun in an earlier process; a new one is begun.
        """
        episode_id = job.spec.episode_id
        async with asyncio.TaskGroup() as group:
            # A task of its own, so that a cancelled episode does not cancel its group.
            self._live[episode_id] = group.create_task(self._play(job, is_restart), name=episode_id)
            try:
                await asyncio.wait([self._live[episode_id]])
            finally:
                self._live.pop(episode_id).cancel()

    def interrupt(self, episode_id: str) -> bool:
        """Stop playing an episode whose end SQL already holds; whether it was being played."""
        task = self._live.get(episode_id)
        return task is not None and task.cancel()

    async def flush_sent(self) -> None:
        """Record what was sent to the trainer. A crash before it sends those again, which is harmless."""
        sent, self._sent = self._sent, []
        if sent:
            await self._store.mark_sent(sent)

    async def _play(self, job: Job, is_restart: bool) -> None:
        try:
            if is_restart:
                spec = job.spec
                attempt = await self._store.next_attempt(spec.episode_id, spec.attempt, self._clock.now())
                if attempt is None:
                    return
                job = replace(job, spec=replace(spec, attempt=attempt))
            for num_failures in range(1, self._retry.max_failures + 1):
                record = await self._attempt(job)
                is_last = num_failures == self._retry.max_failures
                if record.trajectory.outcome is not Outcome.INFRA_FAILED or is_last:
                    await self._finish(job, record)
                    return
                attempt = await self._next_attempt(job.spec, record, num_failures)
                if attempt is None:
                    return
                job = replace(job, spec=replace(job.spec, attempt=attempt))
        except Exception:
            # The episode stays open in SQL: a restart or the reconciler takes it up.
            log.exception("episode.failed", episode_id=job.spec.episode_id)
            self._metrics.errors.labels("episode").inc()

    async def _attempt(self, job: Job) -> EpisodeRecord:
        started_at_s = self._clock.monotonic()
        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout(self._retry.attempt_deadline_s):
                tools = await self._catalogue.tools()
                record = await run_episode(
                    job.spec,
                    policy=job.make_policy(),
                    sandboxes=self._sandboxes,
                    chat=self._chat,
                    tools=tools,
                    clock=self._clock,
                )
        except TimeoutError:
            deadline = f"deadline: the attempt hung for {self._retry.attempt_deadline_s} s"
            record = self._unplayed(job.spec, Outcome.INFRA_FAILED, deadline)
        except PracticumError as error:  # the tools could not be listed
            record = self._unplayed(job.spec, Outcome.INFRA_FAILED, f"{error.code}: {error}")
        except Exception as error:
            log.exception("episode.defect", episode_id=job.spec.episode_id)
            self._metrics.errors.labels("episode").inc()
            record = self._unplayed(job.spec, Outcome.INFRA_FAILED, f"internal: {type(error).__name__}")
        finally:
            self._metrics.in_flight.dec()
        self._metrics.observe(record.trajectory, self._clock.monotonic() - started_at_s)
        return record

    async def _next_attempt(self, spec: EpisodeSpec, record: EpisodeRecord, num_failures: int) -> int | None:
        wait_s = min(self._retry.first_wait_s * 2 ** (num_failures - 1), self._retry.max_wait_s)
        wait_s *= 0.5 + self._random.random() / 2  # a group whose sandboxes failed together comes back apart
        log.warning(
            "episode.retried",
            episode_id=spec.episode_id,
            attempt=spec.attempt,
            error=record.trajectory.error,
            wait_s=round(wait_s, 3),
        )
        self._metrics.retries.inc()
        await self._clock.sleep(wait_s)
        return await self._store.next_attempt(spec.episode_id, spec.attempt, self._clock.now())

    async def _finish(self, job: Job, record: EpisodeRecord) -> None:
        trajectory = record.trajectory
        to_trainer = trajectory.run_id != "" and (
            not job.is_graded or trajectory.outcome is Outcome.INFRA_FAILED
        )
        stored = await self._store.end(
            Ending(
                episode_id=trajectory.episode_id,
                attempt=trajectory.attempt,
                trajectory_id=trajectory.trajectory_id,
                state=_state_after(trajectory.outcome, is_graded=job.is_graded),
                outcome=trajectory.outcome,
                error=trajectory.error,
                trajectory=trajectory_to_pb(trajectory).SerializeToString(),
                diff=record.diff,
                num_turns=len(trajectory.turns),
                num_sampled_tokens=sum(turn.num_sampled_tokens for turn in trajectory.turns),
                is_owed=to_trainer,
            ),
            self._clock.now(),
        )
        if not stored:
            log.info("episode.superseded", trajectory_id=trajectory.trajectory_id)
            return
        log.info(
            "episode.ended",
            trajectory_id=trajectory.trajectory_id,
            outcome=trajectory.outcome,
            turns=len(trajectory.turns),
            error=trajectory.error,
        )
        try:
            if to_trainer:
                await self._queue.publish(trajectories(trajectory.run_id), trajectory_to_pb(trajectory))
                self._sent.append(trajectory.episode_id)
            elif trajectory.outcome is not Outcome.INFRA_FAILED:
                await self._queue.publish(GRADING, grade_request(trajectory, job.spec.task, record.diff))
        except PracticumError as error:
            # SQL holds what is owed; the reconciler sends it when the queue is back.
            log.warning("episode.not_sent", trajectory_id=trajectory.trajectory_id, error=str(error))

    def _unplayed(self, spec: EpisodeSpec, outcome: Outcome, error: str) -> EpisodeRecord:
        return unplayed(spec, outcome=outcome, error=error, chat=self._chat, clock=self._clock)


def _state_after(outcome: Outcome, *, is_graded: bool) -> EpisodeState:
    if outcome is Outcome.INFRA_FAILED:
        return EpisodeState.INFRA_FAILED
    return EpisodeState.GRADING if is_graded else EpisodeState.RECORDED
