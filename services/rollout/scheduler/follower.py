"""Follows the trainer's running runs and keeps their groups going.

The trainer is the truth about runs and is asked every `poll_interval_s`; what was started is in SQL. A run
gets groups only while the engines serve its weights and only as far as the staleness rule allows (see
`runs.group_limit`). The episodes of a group start together. A run that is over has its episodes cancelled;
a paused one finishes those in flight.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby

from practicum.clock import Clock
from practicum.errors import NotFound, PracticumError
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from services.rollout.engine.pool import EnginePool
from services.rollout.metrics import Metrics
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.crew import Crew
from services.rollout.scheduler.healing import WeightHealer
from services.rollout.scheduler.jobs import JobMaker, PlaySettings
from services.rollout.scheduler.runner import EpisodeRunner, Job
from services.rollout.scheduler.runs import Run, Trainer, group_limit
from services.rollout.scheduler.selection import TaskShelf, task_of_group
from services.rollout.store.episodes import EpisodeStore, NewEpisode, StoredEpisode
from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import Split, Task

log = get_logger("rollout.scheduler")

_ORPHAN_AFTER_S = 60.0
_LOOK_FOR_ORPHANS_EVERY_S = 15.0


@dataclass(slots=True)
class _Followed:
    """A run and how far its groups are."""

    run: Run
    task_ids: list[str]
    next_index: int
    owed: list[list[StoredEpisode]]  # groups with open episodes that nobody plays
    progress_at_s: float  # when the trainer last consumed a group, or a group was started
    swept_at_s: float  # when open episodes that nobody plays were last looked for


class RunFollower:
    """The worker that turns runs into groups of episodes."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        pool: EnginePool,
        healer: WeightHealer,
        suites: SuiteStore,
        episodes: EpisodeStore,
        shelf: TaskShelf,
        runner: EpisodeRunner,
        jobs: JobMaker,
        capacity: Capacity,
        metrics: Metrics,
        clock: Clock,
        new_id: Callable[[str], str],
        poll_interval_s: float = 0.5,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._healer = healer
        self._suites = suites
        self._episodes = episodes
        self._shelf = shelf
        self._runner = runner
        self._jobs = jobs
        self._capacity = capacity
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._poll_interval_s = poll_interval_s
        self._followed: dict[str, _Followed] = {}
        self._away: set[str] = set()  # runs with open episodes here that the trainer does not list as running
        self._complaint = ""
        self._polled_at_s = -math.inf

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then let the episodes in flight end.

        Cancelled, it leaves them to the next start or another replica, as attempt + 1.
        """
        self._away = set(await self._episodes.runs_with_unplayed())
        async with Crew() as crew:
            while not stop.is_set():
                try:
                    await self.tick(crew)
                except PracticumError as error:
                    self._complain(f"{error.code}: {error}")
                except Exception:
                    log.exception("scheduler.failed")
                    self._metrics.errors.labels("follower").inc()
                    await pause(stop, self._poll_interval_s)
                await self._until_something_changed()
            await crew.finish()

    async def tick(self, crew: Crew) -> None:
        """Ask the trainer where it is due, then start what may start."""
        if self._clock.monotonic() - self._polled_at_s >= self._poll_interval_s:
            await self._poll()
            self._polled_at_s = self._clock.monotonic()
        for followed in list(self._followed.values()):
            await self._dispatch(followed, crew)

    async def cancel(self, run_id: str) -> int:
        """End the run's open episodes; their number."""
        ids = await self._episodes.cancel_run(run_id, self._clock.now())
        for episode_id in ids:
            self._runner.interrupt(episode_id)
        self._followed.pop(run_id, None)
        self._away.discard(run_id)
        log.info("run.cancelled", run_id=run_id, episodes=len(ids))
        return len(ids)

    def look_now(self) -> None:
        """Ask the trainer at once: a version was published, so groups may be waiting to start."""
        self._polled_at_s = -math.inf
        self._capacity.freed.set()

    def follows(self, run_id: str) -> bool:
        """Whether the run was running at the last look."""
        return run_id in self._followed

    def stalled(self, after_s: float) -> list[tuple[Run, int]]:
        """Runs without progress for so long although nothing is being played, each told once in that time.

        With each, the first group index that the trainer may still wait for.
        """
        now_s = self._clock.monotonic()
        found = []
        for followed in self._followed.values():
            run = followed.run
            if now_s - followed.progress_at_s < after_s:
                continue
            if followed.owed or self._runner.num_live_of(run.run_id):
                continue
            followed.progress_at_s = now_s
            num_outstanding = 2 * (run.max_staleness + 1) * run.groups_per_step
            found.append((run, max(0, followed.next_index - num_outstanding)))
        return found

    async def _poll(self) -> None:
        running = {run.run_id: run for run in await self._trainer.running()}
        self._away |= self._followed.keys() - running.keys()
        self._away -= running.keys()
        for run_id in list(self._away):
            self._followed.pop(run_id, None)
            if await self._is_over(run_id):
                await self.cancel(run_id)
        await self._healer.look_after(list(running.values()))
        for run_id, run in running.items():
            known = self._followed.get(run_id)
            if known is not None:
                if run.groups_consumed != known.run.groups_consumed:
                    known.progress_at_s = self._clock.monotonic()
                known.run = run
                await self._sweep(known)
            elif (followed := await self._take_up(run)) is not None:
                self._followed[run_id] = followed

    async def _is_over(self, run_id: str) -> bool:
        try:
            return (await self._trainer.state_of(run_id)).is_over
        except NotFound:
            return True

    async def _take_up(self, run: Run) -> _Followed | None:
        """What a run needs to be followed; None while its suite is not ready."""
        suite = await self._suites.find(run.suite)
        if suite is None:
            self._complain(f"run {run.run_id} samples suite {run.suite!r}, which does not exist")
            return None
        if num_waiting := await self._suites.num_admitting(suite.suite_id):
            self._complain(f"run {run.run_id} waits for {num_waiting} tasks of {run.suite!r} to be admitted")
            return None
        suite_id = await self._episodes.bind_run(run.run_id, suite.suite_id, self._clock.now())
        task_ids = await self._suites.admitted_ids(suite_id, Split.TRAIN)
        if not task_ids:
            self._complain(f"run {run.run_id}: no train task of {run.suite!r} was admitted")
            return None
        owed = self._unplayed_groups(await self._episodes.unplayed(run_id=run.run_id))
        next_index = await self._episodes.num_groups(run.run_id)
        log.info("run.followed", run_id=run.run_id, tasks=len(task_ids), groups=next_index, owed=len(owed))
        return _Followed(
            run=run,
            task_ids=task_ids,
            next_index=next_index,
            owed=owed,
            progress_at_s=self._clock.monotonic(),
            swept_at_s=self._clock.monotonic(),
        )

    async def _sweep(self, followed: _Followed) -> None:
        """Take up episodes that lie open and unplayed: the record of their end or next attempt was lost."""
        now_s = self._clock.monotonic()
        if followed.owed or now_s - followed.swept_at_s < _LOOK_FOR_ORPHANS_EVERY_S:
            return
        followed.swept_at_s = now_s
        before = self._clock.now() - timedelta(seconds=_ORPHAN_AFTER_S)
        unplayed = await self._episodes.unplayed(run_id=followed.run.run_id)
        followed.owed = self._unplayed_groups([found for found in unplayed if found.updated_at < before])
        if followed.owed:
            log.warning("run.orphans", run_id=followed.run.run_id, groups=len(followed.owed))

    def _unplayed_groups(self, open_ones: Sequence[StoredEpisode]) -> list[list[StoredEpisode]]:
        """Open episodes by group, without those in play: a run that paused shortly still has some."""
        unplayed = [episode for episode in open_ones if not self._runner.is_live(episode.episode_id)]
        return [list(members) for _, members in groupby(unplayed, key=lambda episode: episode.group_index)]

    async def _dispatch(self, followed: _Followed, crew: Crew) -> None:
        run, serving = followed.run, self._pool.serving
        if serving is None or serving.run_id != run.run_id:
            return
        while followed.owed and not self._runner.is_draining:
            members = followed.owed[0]
            task = await self._shelf.get(members[0].task_id)
            if not self._capacity.try_take(len(members)):
                return
            self._start(run, task, followed.owed.pop(0), crew, is_restart=True)
        limit = group_limit(run, served_version=serving.weight_version)
        while followed.next_index < limit and not self._runner.is_draining:
            task = await self._shelf.get(task_of_group(followed.task_ids, followed.next_index, run.seed))
            if not self._capacity.try_take(run.group_size):
                return
            try:
                members = await self._create_group(followed, task)
            except BaseException:
                self._capacity.give_back(run.group_size)
                raise
            self._start(run, task, members, crew, is_restart=False)

    async def _create_group(self, followed: _Followed, task: Task) -> list[StoredEpisode]:
        run, index = followed.run, followed.next_index
        group_id = self._new_id("grp")
        members = [
            NewEpisode(
                episode_id=self._new_id("ep"),
                task_id=task.task_id,
                run_id=run.run_id,
                group_id=group_id,
                group_index=index,
                group_size=run.group_size,
                position=position,
            )
            for position in range(run.group_size)
        ]
        now = self._clock.now()
        await self._episodes.create_group(run.run_id, index, members, now)
        followed.next_index += 1
        followed.progress_at_s = self._clock.monotonic()
        return [member.stored(now) for member in members]

    def _start(
        self, run: Run, task: Task, members: list[StoredEpisode], crew: Crew, *, is_restart: bool
    ) -> None:
        """Start a group whose places are taken."""
        settings = PlaySettings(sampling=run.sampling, max_turns=run.max_turns, max_tokens=run.max_tokens)
        for episode in members:
            job = self._jobs.sampled(episode, task, settings)
            crew.start(self._play(job, is_restart=is_restart))

    async def _play(self, job: Job, *, is_restart: bool) -> None:
        try:
            await self._runner.play(job, is_restart=is_restart)
        finally:
            self._capacity.give_back(1)

    async def _until_something_changed(self) -> None:
        try:
            async with asyncio.timeout(self._poll_interval_s):
                await self._capacity.freed.wait()
        except TimeoutError:
            return
        self._capacity.freed.clear()

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.warning("scheduler.waiting", reason=text)
