"""Plays demonstrations: the episode loop with a script for a policy, in real sandboxes, without grading.

A set is in SQL with its scripts before it begins. Every replica claims its share of the episodes, whichever
one was asked, once their tasks have a verdict. Each episode goes to the trainer by itself: its group is the
episode.
"""

import asyncio
from collections.abc import Sequence

from practicum.clock import Clock
from practicum.errors import Overloaded, PracticumError
from practicum.telemetry.logs import get_logger
from services.rollout.metrics import Metrics
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.claiming import Claimer
from services.rollout.scheduler.crew import Crew
from services.rollout.scheduler.jobs import JobMaker
from services.rollout.scheduler.open_work import OpenWork
from services.rollout.scheduler.runner import EpisodeRunner
from services.rollout.scheduler.selection import TaskShelf
from services.rollout.store.claims import Whose
from services.rollout.store.demonstrations import DemonstrationSet, DemonstrationStore, Script
from services.rollout.store.episodes import EpisodeStore, StoredEpisode
from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import TaskState

log = get_logger("rollout.demonstration")

MAX_RUNNING = 16
_POLL_S = 0.5


class DemonstrationPlayer:
    """The worker that plays sets of demonstrations, some at once."""

    def __init__(
        self,
        *,
        store: DemonstrationStore,
        episodes: EpisodeStore,
        suites: SuiteStore,
        shelf: TaskShelf,
        runner: EpisodeRunner,
        jobs: JobMaker,
        capacity: Capacity,
        claimer: Claimer,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._store = store
        self._episodes = episodes
        self._suites = suites
        self._shelf = shelf
        self._runner = runner
        self._jobs = jobs
        self._capacity = capacity
        self._claimer = claimer
        self._metrics = metrics
        self._clock = clock
        self._open = OpenWork(
            "demonstration",
            find=store.running,
            id_of=lambda demonstration: demonstration.demonstration_id,
            play=self._play_share,
            metrics=metrics,
        )

    async def check_room(self) -> None:
        """Raise `Overloaded` where no further set may be submitted now."""
        if len(await self._store.running()) >= MAX_RUNNING:
            raise Overloaded(f"{MAX_RUNNING} demonstration sets are being played", retry_after_s=10)

    def look_now(self) -> None:
        """Play what was stored since the last look."""
        self._open.look_now()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then let the episodes in flight end; the rest is left to whoever comes."""
        await self._open.run(stop)

    async def _play_share(self, demonstration: DemonstrationSet, crew: Crew) -> None:
        """Claim and play until the set is complete: episodes of a replica that is gone are free later."""
        demonstration_id = demonstration.demonstration_id
        whose = Whose(demonstration_id=demonstration_id)
        scripts: Sequence[Script] = ()
        while not await self._store.complete_if_done(demonstration_id, self._clock.now()):
            if self._runner.is_draining:
                return
            if not scripts:
                scripts = await self._store.scripts(demonstration_id)
            claimed = await self._claimer.take(whose)
            for episode in claimed:
                crew.start(self._play_one(episode, scripts[episode.position]))
            if not claimed:
                await self._clock.sleep(_POLL_S)
        log.info("demonstration.completed", demonstration_id=demonstration_id)

    async def _play_one(self, episode: StoredEpisode, script: Script) -> None:
        try:
            # Not from the shelf, which holds what never changes of a task.
            if (await self._suites.get_task(episode.task_id)).state is TaskState.REJECTED:
                await self._drop(episode)
                return
            task = await self._shelf.get(episode.task_id)
            await self._runner.play(self._jobs.scripted(episode, task, script))
        except Exception:
            log.exception("episode.not_played", episode_id=episode.episode_id)
            self._metrics.errors.labels("demonstration").inc()
        finally:
            self._capacity.give_back(1)

    async def _drop(self, episode: StoredEpisode) -> None:
        try:
            await self._episodes.cancel(episode.episode_id, self._clock.now())
            await self._episodes.mark_sent([episode.episode_id])  # nobody waits for it
        except PracticumError as error:
            log.info("demonstration.drop", episode_id=episode.episode_id, error=str(error))
