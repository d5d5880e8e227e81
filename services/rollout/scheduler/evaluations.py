"""Plays evaluations: a drawn set of tasks, each sampled some times, graded like a run's episodes.

An evaluation is in SQL with all its episodes before it begins. Every replica claims its share of them,
whichever one was asked; whether it is complete is decided in SQL.
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
from services.rollout.scheduler.claiming import Claimer
from services.rollout.scheduler.crew import Crew
from services.rollout.scheduler.jobs import JobMaker, PlaySettings
from services.rollout.scheduler.open_work import OpenWork
from services.rollout.scheduler.runner import EpisodeRunner
from services.rollout.scheduler.selection import TaskShelf, draw
from services.rollout.store.claims import Whose
from services.rollout.store.episodes import NewEpisode, StoredEpisode
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
        shelf: TaskShelf,
        pool: EnginePool,
        runner: EpisodeRunner,
        jobs: JobMaker,
        capacity: Capacity,
        claimer: Claimer,
        metrics: Metrics,
        clock: Clock,
        new_id: Callable[[str], str],
    ) -> None:
        self._store = store
        self._suites = suites
        self._shelf = shelf
        self._pool = pool
        self._runner = runner
        self._jobs = jobs
        self._capacity = capacity
        self._claimer = claimer
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._open = OpenWork(
            "evaluation",
            find=store.running,
            id_of=lambda evaluation: evaluation.evaluation_id,
            play=self._play_share,
            metrics=metrics,
        )

    async def submit(self, request: dict[str, Any], creation_of: Callable[[str], Creation]) -> str:
        """Store an evaluation and begin it soon; the answer to give, or the one its key was given before.

        `creation_of` makes, from the evaluation's id, what identifies the request and what it answers.
        `request` has suite, split, num_tasks, episodes_per_task, temperature, max_turns, max_tokens,
        max_new_tokens and seed. Raises `InvalidInput` naming the field, `Overloaded` when too many run.
        """
        if len(await self._store.running()) >= MAX_RUNNING:
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
        self._open.look_now()
        return answer

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`, then let the episodes in flight end; the rest is left to whoever comes."""
        await self._open.run(stop)

    async def _play_share(self, evaluation: Evaluation, crew: Crew) -> None:
        """Claim and play until it is complete: episodes of a replica that is gone are free later."""
        evaluation_id, settings = evaluation.evaluation_id, _settings(evaluation)
        live: set[str] = set()
        before: dict[str, Usage] | None = None  # when this replica began to generate for it
        available_s = 0.0  # while it did
        while True:
            if before is not None and not live:
                busy_s, span_s = slot_seconds(before, self._pool.usage())
                before, available_s = None, available_s + span_s
                await self._store.add_usage(evaluation_id, busy_s=busy_s, available_s=available_s)
            # What is live here is not done, or its usage is still to be counted.
            if not live and await self._store.complete_if_done(evaluation_id, self._clock.now()):
                break
            if self._runner.is_draining:
                return
            serving = self._pool.serving
            claimed = [] if serving is None else await self._claimer.take(Whose(evaluation_id=evaluation_id))
            for episode in claimed:
                live.add(episode.episode_id)
                crew.start(self._play_one(episode, settings, live))
            if claimed and serving is not None:
                if before is None:
                    before = self._pool.usage()
                    await self._store.set_weight_version(evaluation_id, serving.weight_version)
                continue
            await self._clock.sleep(_GRADE_POLL_S)
        log.info("evaluation.completed", evaluation_id=evaluation_id)

    async def _play_one(self, episode: StoredEpisode, settings: PlaySettings, live: set[str]) -> None:
        try:
            task = await self._shelf.get(episode.task_id)
            await self._runner.play(self._jobs.sampled(episode, task, settings))
        except Exception:
            log.exception("episode.not_played", episode_id=episode.episode_id)
            self._metrics.errors.labels("evaluation").inc()
        finally:
            live.discard(episode.episode_id)
            self._capacity.give_back(1)


def slot_seconds(before: dict[str, Usage], after: dict[str, Usage]) -> tuple[float, float]:
    """Slot time of all engines between two readings: spent generating, and all there was."""
    spans = [after[engine_id].since(before[engine_id]) for engine_id in after]
    return sum(span.busy_slot_seconds for span in spans), sum(span.slots * span.seconds for span in spans)


def _settings(evaluation: Evaluation) -> PlaySettings:
    request = evaluation.request
    return PlaySettings(
        sampling=SamplingParams(temperature=request["temperature"], max_new_tokens=request["max_new_tokens"]),
        max_turns=request["max_turns"],
        max_tokens=request["max_tokens"],
    )
