"""Follows the trainer's running runs and keeps their groups going.

The trainer is the truth about runs and is asked every `poll_interval_s`; what was started is in SQL. A run
gets groups only while the engines serve its weights and only as far as the staleness rule allows (see
`runs.group_limit`). The episodes of a group start together. A run that is over has its episodes cancelled;
a paused one finishes those in flight.

Replicas share a run without talking to each other: the one that stores the next group plays it, since an
index is stored once, and open episodes that nobody owns are claimed. None takes more than its share at a
look, so that the others find something to do; what they leave is taken at the next.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from practicum.clock import Clock
from practicum.errors import NotFound, PracticumError
from practicum.pauses import pause
from practicum.telemetry.logs import get_logger
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.weights import WeightPublisher
from services.rollout.metrics import Metrics
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.crew import Crew
from services.rollout.scheduler.healing import WeightHealer
from services.rollout.scheduler.jobs import JobMaker, PlaySettings
from services.rollout.scheduler.membership import Membership
from services.rollout.scheduler.runner import EpisodeRunner, Job
from services.rollout.scheduler.runs import Run, Trainer, group_limit
from services.rollout.scheduler.selection import TaskShelf, task_of_group
from services.rollout.store.claims import ClaimStore, Whose
from services.rollout.store.episodes import EpisodeStore, NewEpisode, StoredEpisode
from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import Split, Task

log = get_logger("rollout.scheduler")

_COUNT_UNOWNED_EVERY_S = 5.0
_YIELD_S = 2.0  # how long groups beyond its share are left to the others


@dataclass(slots=True)
class _Followed:
    """A run and how far its groups are."""

    run: Run
    task_ids: list[str]
    next_index: int
    num_unowned: int  # open episodes that nobody played at the last count
    num_startable: int | None  # groups that this replica may still start before the next look; None = not set
    last_index: int  # the next index at the last look, and when it moved
    moved_at_s: float
    progress_at_s: float  # when the trainer last consumed a group, or a group was started
    counted_at_s: float  # when the unowned were last counted


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
        claims: ClaimStore,
        membership: Membership,
        publisher: WeightPublisher,
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
        self._claims = claims
        self._membership = membership
        self._publisher = publisher
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

        Cancelled, it leaves them to another replica or the next start, as attempt + 1.
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
        """End the run's open episodes; their number. Other replicas stop theirs at their next look."""
        ids = await self._episodes.cancel_run(run_id, self._clock.now())
        self._runner.interrupt_run(run_id, sampled_only=False)
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

    def look_for_unowned(self) -> None:
        """Count at the next look what nobody plays: a replica came or went, or gave episodes back."""
        for followed in self._followed.values():
            followed.counted_at_s = -math.inf

    async def stalled(self, after_s: float) -> list[tuple[Run, int]]:
        """Runs without progress for so long although nothing is being played, each told once in that time.

        With each, the first group index that the trainer may still wait for.
        """
        now_s = self._clock.monotonic()
        found = []
        for followed in list(self._followed.values()):
            run = followed.run
            if now_s - followed.progress_at_s < after_s or await self._episodes.num_running(run.run_id):
                continue
            followed.progress_at_s = now_s
            num_outstanding = 2 * (run.max_staleness + 1) * run.groups_per_step
            num_groups = await self._episodes.num_groups(run.run_id)
            found.append((run, max(0, num_groups - num_outstanding)))
        return found

    async def _poll(self) -> None:
        if not self._membership.is_alone:
            await self._publisher.refresh()
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
                await self._look_at(known)
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
        next_index = await self._episodes.num_groups(run.run_id)
        num_unowned = await self._claims.num_unowned(Whose(run_id=run.run_id))
        log.info(
            "run.followed", run_id=run.run_id, tasks=len(task_ids), groups=next_index, unowned=num_unowned
        )
        return _Followed(
            run=run,
            task_ids=task_ids,
            next_index=next_index,
            num_unowned=num_unowned,
            num_startable=None,
            last_index=next_index,
            moved_at_s=self._clock.monotonic(),
            progress_at_s=self._clock.monotonic(),
            counted_at_s=self._clock.monotonic(),
        )

    async def _look_at(self, followed: _Followed) -> None:
        """See what the other replicas did, and what nobody plays."""
        followed.num_startable = None
        run_id, now_s = followed.run.run_id, self._clock.monotonic()
        if not self._membership.is_alone:
            followed.next_index = await self._episodes.num_groups(run_id)
        if now_s - followed.counted_at_s >= _COUNT_UNOWNED_EVERY_S:
            followed.counted_at_s = now_s
            followed.num_unowned = await self._claims.num_unowned(Whose(run_id=run_id))

    async def _dispatch(self, followed: _Followed, crew: Crew) -> None:
        run, serving = followed.run, self._pool.serving
        if serving is None or serving.run_id != run.run_id or self._runner.is_draining:
            return
        if followed.num_unowned and not await self._claim(followed, crew):
            return
        limit = group_limit(run, served_version=serving.weight_version)
        if followed.num_startable is None:
            followed.num_startable = self._num_startable(followed, limit)
        while followed.next_index < limit and followed.num_startable > 0 and not self._runner.is_draining:
            task = await self._shelf.get(task_of_group(followed.task_ids, followed.next_index, run.seed))
            if not self._capacity.try_take(run.group_size):
                return
            members: list[StoredEpisode] = []
            try:
                members = await self._create_group(followed, task)
            finally:
                if not members:
                    self._capacity.give_back(run.group_size)
            for episode in members:
                self._start(run, task, episode, crew)

    def _num_startable(self, followed: _Followed, limit: int) -> int:
        """Groups to start at this look: what there is, or where there are other replicas, a share of it."""
        number = max(0, limit - followed.next_index)
        if self._membership.is_alone:
            return number
        run, now_s = followed.run, self._clock.monotonic()
        if followed.next_index != followed.last_index:
            followed.last_index, followed.moved_at_s = followed.next_index, now_s
        own_share = self._membership.share(limit - run.groups_consumed) * run.group_size
        has_share = self._runner.num_live_of(run.run_id) >= own_share
        # More than its share is taken where the others leave it lying: they are full, or do not follow yet.
        return 0 if has_share and now_s - followed.moved_at_s < _YIELD_S else self._membership.share(number)

    async def _claim(self, followed: _Followed, crew: Crew) -> bool:
        """Take up this replica's share of what nobody plays; False where there is no place for more."""
        run = followed.run
        wanted = self._membership.share(followed.num_unowned)
        num_places = self._capacity.try_take_some(wanted)
        claimed: list[StoredEpisode] = []
        try:
            if num_places:
                claimed = await self._claims.claim(Whose(run_id=run.run_id), num_places, self._clock.now())
            for episode in claimed:
                task = await self._shelf.get(episode.task_id)
                self._start(run, task, episode, crew)
                num_places -= 1
        finally:
            self._capacity.give_back(num_places)
        if claimed:
            log.info("run.claimed", run_id=run.run_id, episodes=len(claimed))
        followed.num_unowned -= len(claimed)
        is_full = len(claimed) + num_places < wanted
        if num_places:
            followed.num_unowned = 0  # the others were faster
        return not is_full

    async def _create_group(self, followed: _Followed, task: Task) -> list[StoredEpisode]:
        """The episodes of the next group; none where another replica stored it first."""
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
        if not await self._episodes.create_group(run.run_id, index, members, now):
            followed.next_index = await self._episodes.num_groups(run.run_id)
            return []
        followed.next_index += 1
        if followed.num_startable:
            followed.num_startable -= 1
        followed.progress_at_s = self._clock.monotonic()
        return [member.stored(now, self._episodes.instance) for member in members]

    def _start(self, run: Run, task: Task, episode: StoredEpisode, crew: Crew) -> None:
        """Start an episode whose place is taken."""
        settings = PlaySettings(sampling=run.sampling, max_turns=run.max_turns, max_tokens=run.max_tokens)
        crew.start(self._play(self._jobs.sampled(episode, task, settings)))

    async def _play(self, job: Job) -> None:
        try:
            await self._runner.play(job)
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
