"""Plays an episode to its end: attempts, their record in SQL, and what is sent on.

A platform failure is tried again, after a wait, up to `max_failures` times in this process; a policy's
failure never is. An attempt's end is committed before anything is sent, so that what was sent can be sent
again. Whoever lost the compare-and-set on the state (a cancel, a newer attempt, perhaps of another replica)
sends nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

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
from services.rollout.store.claims import ClaimStore
from services.rollout.store.episodes import Ending, EpisodeState, EpisodeStore

log = get_logger("rollout.episode")

T = TypeVar("T")

_MAX_WRITES = 8  # times a record is written before it is left to whoever finds the episode open


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The budget for platform failures of one episode."""

    max_failures: int = 3
    first_wait_s: float = 2.0
    max_wait_s: float = 20.0
    first_write_wait_s: float = 0.25  # before a record that SQL did not take is written again
    attempt_deadline_s: float = 600.0  # a hanging attempt is a platform failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An episode to be played."""

    spec: EpisodeSpec
    make_policy: Callable[[], Policy]  # a fresh one for each attempt
    is_graded: bool  # False: a demonstration, sent to the trainer as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    """A job being played."""

    job: Job
    task: asyncio.Task[None]

    def interrupt(self) -> bool:
        """Cancel it once: cancelled again while it cleans up, it would leave its sandbox open."""
        return bool(self.task.cancelling()) or self.task.cancel()


class EpisodeRunner:
    """Plays episodes; safe to use from many tasks at once."""

    def __init__(
        self,
        *,
        store: EpisodeStore,
        claims: ClaimStore,
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
        self._claims = claims
        self._queue = queue
        self._sandboxes = sandboxes
        self._catalogue = catalogue
        self._chat = chat
        self._clock = clock
        self._random = random
        self._retry = retry
        self._metrics = metrics
        self._live: dict[str, _Live] = {}
        self._between: set[asyncio.Task[None]] = set()  # those that wait for their next attempt
        self._is_draining = False
        self._sent: list[str] = []

    @property
    def num_live(self) -> int:
        """Episodes being played now."""
        return len(self._live)

    def is_live(self, episode_id: str) -> bool:
        """Whether the episode is being played now."""
        return episode_id in self._live

    def num_live_of(self, run_id: str) -> int:
        """Episodes of a run being played now."""
        return sum(live.job.spec.run_id == run_id for live in self._live.values())

    @property
    def is_draining(self) -> bool:
        """Whether the service stops: nothing more is begun, and whoever would begin it need not try."""
        return self._is_draining

    async def drain(self, stop: asyncio.Event) -> None:
        """From `stop` on begin no episode and no further attempt; SQL keeps them open for whoever comes."""
        await stop.wait()
        self._is_draining = True
        for task in list(self._between):
            task.cancel()
        log.info("episodes.draining", in_flight=len(self._live))

    async def play(self, job: Job) -> None:
        """Play to the end of the episode, which this replica owns. Raises nothing but a cancellation from
        outside.

        The caller has made sure that the episode is not live.
        """
        if self._is_draining:
            return
        episode_id = job.spec.episode_id
        async with asyncio.TaskGroup() as group:
            # A task of its own, so that a cancelled episode does not cancel its group.
            task = group.create_task(self._play(job), name=episode_id)
            live = _Live(job=job, task=task)
            self._live[episode_id] = live
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
                if self._live.get(episode_id) is live:
                    del self._live[episode_id]
        # Where it is live again, this replica owns it as a later attempt.
        if task.cancelled() and episode_id not in self._live:
            await self._give_back(episode_id)

    def interrupt(self, episode_id: str) -> bool:
        """Stop playing an episode; whether it was being played. One that is open may be claimed then."""
        live = self._live.get(episode_id)
        return live is not None and live.interrupt()

    def interrupt_run(self, run_id: str, *, sampled_only: bool = True) -> None:
        """Stop playing a run's episodes, or only what the engines sample for it."""
        self._interrupt(
            [
                live
                for live in self._live.values()
                if live.job.spec.run_id == run_id and (live.job.is_graded or not sampled_only)
            ],
            run_id,
        )

    def interrupt_all(self) -> None:
        """Stop playing everything."""
        self._interrupt(list(self._live.values()), "")

    async def drop_lost(self) -> None:
        """Stop playing what was cancelled or taken over at another replica."""
        if self._live:
            for episode_id in await self._claims.lost(list(self._live)):
                if self.interrupt(episode_id):
                    log.info("episode.lost", episode_id=episode_id)

    async def free_orphans(self, *, before: datetime) -> int:
        """Let anyone claim what this replica owns and does not play: the record of its end was lost."""
        owned = await self._claims.own_running(before=before)
        orphans = [episode_id for episode_id in owned if episode_id not in self._live]
        if orphans:
            log.warning("episodes.orphans", number=len(orphans))
            await self._claims.give_back(orphans)
        return len(orphans)

    def _interrupt(self, found: Sequence[_Live], run_id: str) -> None:
        for live in found:
            live.interrupt()
        if found:
            log.info("run.interrupted", run_id=run_id, episodes=len(found))

    async def _give_back(self, episode_id: str) -> None:
        try:
            await self._claims.give_back([episode_id])
        except SQLAlchemyError as error:
            log.warning("episode.not_given_back", episode_id=episode_id, error=type(error).__name__)

    async def flush_sent(self) -> None:
        """Record what was sent to the trainer. A crash before it sends those again, which is harmless."""
        sent, self._sent = self._sent, []
        if not sent:
            return
        try:
            await self._store.mark_sent(sent)
        except SQLAlchemyError as error:
            self._sent += sent
            log.warning("episodes.not_marked", number=len(sent), error=type(error).__name__)

    async def _play(self, job: Job) -> None:
        try:
            for num_failures in range(1, self._retry.max_failures + 1):
                record = await self._attempt(job)
                is_last = num_failures == self._retry.max_failures
                if record.trajectory.outcome is not Outcome.INFRA_FAILED or is_last:
                    await self._finish(job, record)
                    return
                if self._is_draining:
                    return
                attempt = await self._next_attempt(job.spec, record, num_failures)
                if attempt is None:
                    return
                job = replace(job, spec=replace(job.spec, attempt=attempt))
        except Exception:
            # The episode stays open in SQL, and is claimed again once it is found to be an orphan.
            log.exception("episode.failed", episode_id=job.spec.episode_id)
            self._metrics.errors.labels("episode").inc()

    async def _attempt(self, job: Job) -> EpisodeRecord:
        started_at_s = self._clock.monotonic()
        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout(self._retry.attempt_deadline_s):
                tools = await self._catalogue.awaited_tools()
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
        task = asyncio.current_task()
        assert task is not None
        self._between.add(task)
        try:
            await self._clock.sleep(wait_s)
        finally:
            self._between.discard(task)
        return await self._begin_next(spec)

    async def _begin_next(self, spec: EpisodeSpec) -> int | None:
        async def write() -> int | None:
            return await self._store.next_attempt(spec.episode_id, spec.attempt, self._clock.now())

        return await self._written(spec.episode_id, write)

    async def _written(self, episode_id: str, write: Callable[[], Awaitable[T]]) -> T:
        """Write to SQL, again after a wait while it is away or busy.

        A write whose answer was lost after its commit is refused the second time by its compare-and-set, and
        the reconciler sends what is then owed.
        """
        wait_s = self._retry.first_write_wait_s
        for _ in range(_MAX_WRITES - 1):
            try:
                return await write()
            except IntegrityError:
                raise
            except (DBAPIError, PoolTimeout) as error:
                log.warning("episode.not_written", episode_id=episode_id, error=type(error).__name__)
            await self._clock.sleep(wait_s * (0.5 + self._random.random() / 2))
            wait_s = min(wait_s * 2, self._retry.max_wait_s)
        return await write()

    async def _finish(self, job: Job, record: EpisodeRecord) -> None:
        trajectory = record.trajectory
        to_trainer = trajectory.run_id != "" and (
            not job.is_graded or trajectory.outcome is Outcome.INFRA_FAILED
        )
        ending = Ending(
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
        )

        async def write() -> bool:
            return await self._store.end(ending, self._clock.now())

        if not await self._written(trajectory.episode_id, write):
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
