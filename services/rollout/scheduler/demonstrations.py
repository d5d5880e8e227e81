"""Plays demonstrations: the episode loop with a script for a policy, in real sandboxes, without grading.

A set is in SQL with its scripts before it begins, so that a restart takes it up again. Each episode goes to
the trainer by itself: its group is the episode.
"""

import asyncio

from practicum.clock import Clock
from practicum.errors import Overloaded, PracticumError
from practicum.telemetry.logs import get_logger
from services.rollout.metrics import Metrics
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.crew import Crew
from services.rollout.scheduler.jobs import JobMaker
from services.rollout.scheduler.runner import EpisodeRunner
from services.rollout.scheduler.selection import TaskShelf
from services.rollout.store.demonstrations import DemonstrationStore, Script
from services.rollout.store.episodes import EpisodeState, EpisodeStore, StoredEpisode
from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import TaskState

log = get_logger("rollout.demonstration")

MAX_RUNNING = 16
_ADMISSION_POLL_S = 0.5


class DemonstrationPlayer:
    """The worker that plays sets of demonstrations, some at once."""

    def __init__(
        self,
        *,
        store: DemonstrationStore,
        suites: SuiteStore,
        episodes: EpisodeStore,
        shelf: TaskShelf,
        runner: EpisodeRunner,
        jobs: JobMaker,
        capacity: Capacity,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._store = store
        self._suites = suites
        self._episodes = episodes
        self._shelf = shelf
        self._runner = runner
        self._jobs = jobs
        self._capacity = capacity
        self._metrics = metrics
        self._clock = clock
        self._asked: asyncio.Queue[str] = asyncio.Queue(MAX_RUNNING)
        self._seen: set[str] = set()

    def check_room(self) -> None:
        """Raise `Overloaded` where no further set may be submitted now."""
        if len(self._seen) >= MAX_RUNNING or self._asked.full():
            raise Overloaded(f"{MAX_RUNNING} demonstration sets are being played", retry_after_s=10)

    async def begin(self, demonstration_id: str) -> None:
        """Play a stored set soon; asking twice is no error."""
        await self._asked.put(demonstration_id)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then let the episodes in flight end; the rest is taken up at the next start."""
        left = await self._store.running()
        async with Crew() as crew:
            for demonstration in left:
                self._seen.add(demonstration.demonstration_id)
                crew.start(self._play(demonstration.demonstration_id, is_restart=True))
            while not stop.is_set():
                try:
                    async with asyncio.timeout(0.5):
                        demonstration_id = await self._asked.get()
                except TimeoutError:
                    continue
                if demonstration_id not in self._seen:
                    self._seen.add(demonstration_id)
                    crew.start(self._play(demonstration_id, is_restart=False))
            await crew.finish()

    async def _play(self, demonstration_id: str, *, is_restart: bool) -> None:
        try:
            scripts = await self._store.scripts(demonstration_id)
            members = await self._episodes.unplayed(demonstration_id=demonstration_id)
            async with asyncio.TaskGroup() as group:
                for episode in members:
                    script = scripts[episode.position]
                    group.create_task(self._play_one(episode, script, is_restart))
            if self._runner.is_draining:
                return
            await self._store.complete_if_done(demonstration_id, self._clock.now())
            log.info("demonstration.completed", demonstration_id=demonstration_id, episodes=len(members))
        except Exception:
            log.exception("demonstration.failed", demonstration_id=demonstration_id)
            self._metrics.errors.labels("demonstration").inc()
        finally:
            self._seen.discard(demonstration_id)

    async def _play_one(self, episode: StoredEpisode, script: Script, is_restart: bool) -> None:
        async with self._capacity.place():
            if self._runner.is_draining:
                return
            if (await self._episodes.get(episode.episode_id)).state is not EpisodeState.RUNNING:
                return  # it was cancelled while it waited
            if not await self._is_admitted(episode.task_id):
                if not self._runner.is_draining:
                    await self._drop(episode)
                return
            task = await self._shelf.get(episode.task_id)
            await self._runner.play(self._jobs.scripted(episode, task, script), is_restart=is_restart)

    async def _is_admitted(self, task_id: str) -> bool:
        while (state := (await self._suites.get_task(task_id)).state) is TaskState.ADMITTING:
            if self._runner.is_draining:
                return False
            await self._clock.sleep(_ADMISSION_POLL_S)
        return state is TaskState.ADMITTED

    async def _drop(self, episode: StoredEpisode) -> None:
        try:
            await self._episodes.cancel(episode.episode_id, self._clock.now())
            await self._episodes.mark_sent([episode.episode_id])  # nobody waits for it
        except PracticumError as error:
            log.info("demonstration.drop", episode_id=episode.episode_id, error=str(error))
