"""Plays evaluations: a drawn set of tasks, each sampled some times, graded like a run's episodes.

An evaluation is in SQL with all its episodes before it begins, so that a restart takes it up again.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from practicum.clock import Clock
from practicum.errors import InvalidInput, Overloaded
from practicum.telemetry.logs import get_logger
from practicum.trajectory import SamplingParams
from services.rollout.engine.meter import Usage
from services.rollout.engine.pool import EnginePool
from services.rollout.metrics import Metrics
from services.rollout.scheduler.capacity import Capacity
from services.rollout.scheduler.crew import Crew
from services.rollout.scheduler.jobs import JobMaker, PlaySettings
from services.rollout.scheduler.runner import EpisodeRunner
from services.rollout.scheduler.selection import TaskShelf, draw
from services.rollout.store.episodes import EpisodeStore, NewEpisode, StoredEpisode
from services.rollout.store.evaluations import Evaluation, EvaluationState, EvaluationStore
from services.rollout.store.suites import Creation, SuiteStore
from services.rollout.tasks import Split

log = get_logger("rollout.evaluation")

MAX_RUNNING = 16
_GRADE_POLL_S = 0.25


class EvaluationPlayer:
    """The worker that plays evaluations, some at once."""

    def __init__(
        self,
        *,
        store: EvaluationStore,
        suites: SuiteStore,
        episodes: EpisodeStore,
        shelf: TaskShelf,
        pool: EnginePool,
        runner: EpisodeRunner,
        jobs: JobMaker,
        capacity: Capacity,
        metrics: Metrics,
        clock: Clock,
        new_id: Callable[[str], str],
    ) -> None:
        self._store = store
        self._suites = suites
        self._episodes = episodes
        self._shelf = shelf
        self._pool = pool
        self._runner = runner
        self._jobs = jobs
        self._capacity = capacity
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._asked: asyncio.Queue[tuple[Evaluation, bool]] = asyncio.Queue(MAX_RUNNING)
        self._num_running = 0

    async def submit(self, request: dict[str, Any], creation_of: Callable[[str], Creation]) -> str:
        """Store an evaluation and begin it soon; the answer to give, or the one its key was given before.

        `creation_of` makes, from the evaluation's id, what identifies the request and what it answers.
        `request` has suite, split, num_tasks, episodes_per_task, temperature, max_turns, max_tokens,
        max_new_tokens and seed. Raises `InvalidInput` naming the field, `Overloaded` when too many run.
        """
        if self._num_running >= MAX_RUNNING or self._asked.full():
            raise Overloaded(f"{MAX_RUNNING} evaluations are running", retry_after_s=10)
        suite = await self._suites.require(request["suite"], field="suite")
        available = await self._suites.admitted_ids(suite.suite_id, Split(request["split"]))
        if len(available) < request["num_tasks"]:
            raise InvalidInput(
                "num_tasks",
                f"{len(available)} admitted {request['split']} tasks in the suite; ask for at most that many",
            )
        evaluation_id = self._new_id("eval")
        now = self._clock.now()
        evaluation = Evaluation(
            evaluation_id=evaluation_id,
            suite_id=suite.suite_id,
            request=request,
            state=EvaluationState.RUNNING,
            weight_version=None,
            engine_utilisation=None,
            created_at=now,
            finished_at=None,
        )
        members = []
        for index, task_id in enumerate(draw(available, request["num_tasks"], request["seed"])):
            group_id = self._new_id("grp")
            members += [
                NewEpisode(
                    episode_id=self._new_id("ep"),
                    task_id=task_id,
                    run_id="",
                    group_id=group_id,
                    group_index=index,
                    group_size=request["episodes_per_task"],
                    position=position,
                    evaluation_id=evaluation_id,
                )
                for position in range(request["episodes_per_task"])
            ]
        creation = creation_of(evaluation_id)
        answer = await self._store.create(evaluation, members, creation)
        if answer == creation.response_json:  # else the key made another one before
            await self._asked.put((evaluation, False))
        return answer

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then let the episodes in flight end; the rest is taken up at the next start."""
        left = await self._store.running()
        async with Crew() as crew:
            for evaluation in left:
                crew.start(self._play(evaluation, is_restart=True))
            while not stop.is_set():
                try:
                    async with asyncio.timeout(0.5):
                        evaluation, is_restart = await self._asked.get()
                except TimeoutError:
                    continue
                crew.start(self._play(evaluation, is_restart=is_restart))
            await crew.finish()

    async def _play(self, evaluation: Evaluation, *, is_restart: bool) -> None:
        self._num_running += 1
        try:
            await self._play_all(evaluation, is_restart)
            while not await self._store.complete_if_done(evaluation.evaluation_id, self._clock.now()):
                if self._runner.is_draining:
                    return
                await self._clock.sleep(_GRADE_POLL_S)
            log.info("evaluation.completed", evaluation_id=evaluation.evaluation_id)
        except Exception:
            log.exception("evaluation.failed", evaluation_id=evaluation.evaluation_id)
            self._metrics.errors.labels("evaluation").inc()
        finally:
            self._num_running -= 1

    async def _play_all(self, evaluation: Evaluation, is_restart: bool) -> None:
        members = await self._episodes.unplayed(evaluation_id=evaluation.evaluation_id)
        if not members:
            return
        while self._pool.serving is None:
            if self._runner.is_draining:
                return
            await self._clock.sleep(_GRADE_POLL_S)
        await self._store.set_weight_version(evaluation.evaluation_id, self._pool.serving.weight_version)
        request = evaluation.request
        settings = PlaySettings(
            sampling=SamplingParams(
                temperature=request["temperature"], max_new_tokens=request["max_new_tokens"]
            ),
            max_turns=request["max_turns"],
            max_tokens=request["max_tokens"],
        )
        before = self._pool.usage()
        async with asyncio.TaskGroup() as group:
            for episode in members:
                group.create_task(self._play_one(episode, settings, is_restart))
        share = utilisation(before, self._pool.usage())
        await self._store.set_utilisation(evaluation.evaluation_id, share)

    async def _play_one(self, episode: StoredEpisode, settings: PlaySettings, is_restart: bool) -> None:
        async with self._capacity.place():
            task = await self._shelf.get(episode.task_id)
            await self._runner.play(self._jobs.sampled(episode, task, settings), is_restart=is_restart)


def utilisation(before: dict[str, Usage], after: dict[str, Usage]) -> float:
    """Share of all engines' slot time spent generating between two readings."""
    spans = [after[engine_id].since(before[engine_id]) for engine_id in after]
    available = sum(span.slots * span.seconds for span in spans)
    return sum(span.busy_slot_seconds for span in spans) / available if available > 0 else 0.0
