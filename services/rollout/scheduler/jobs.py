"""From a stored episode to a job: the spec and the policy that plays it."""

from dataclasses import dataclass

from practicum.trajectory import SamplingParams
from services.rollout.chat import ChatTemplate
from services.rollout.engine.pool import EnginePool
from services.rollout.episode.loop import EpisodeSpec
from services.rollout.episode.policy import EnginePolicy, Policy, ScriptedPolicy
from services.rollout.scheduler.runner import Job
from services.rollout.store.demonstrations import Script
from services.rollout.store.episodes import StoredEpisode
from services.rollout.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """How an owner's episodes are played."""

    sampling: SamplingParams
    max_turns: int
    max_tokens: int


class JobMaker:
    """Makes jobs with the service's engines, chat form and limits."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        chat: ChatTemplate,
        context_length: int,
        wall_s: float,
        turn_timeout_s: float,
    ) -> None:
        self._pool = pool
        self._chat = chat
        self._context_length = context_length
        self._wall_s = wall_s
        self._turn_timeout_s = turn_timeout_s

    def sampled(self, episode: StoredEpisode, task: Task, settings: PlaySettings) -> Job:
        """An episode that the engines play."""
        spec = self._spec(episode, task, settings)

        def make_policy() -> Policy:
            return EnginePolicy(
                self._pool,
                run_id=episode.run_id,
                affinity=episode.group_id,  # a group shares its prompt, so it shares an engine's prefix cache
                sampling=settings.sampling,
                stop_token_ids=self._chat.stop_ids,
                timeout_s=self._turn_timeout_s,
            )

        return Job(spec=spec, make_policy=make_policy, is_graded=True)

    def scripted(self, episode: StoredEpisode, task: Task, script: Script) -> Job:
        """An episode that follows a script."""
        turns = [self._chat.encode_turn(turn.text, turn.tool_calls) for turn in script]
        settings = PlaySettings(
            sampling=SamplingParams(max_new_tokens=self._context_length),
            max_turns=len(turns),
            max_tokens=self._context_length,
        )
        spec = self._spec(episode, task, settings)
        return Job(spec=spec, make_policy=lambda: ScriptedPolicy(turns), is_graded=False)

    def _spec(self, episode: StoredEpisode, task: Task, settings: PlaySettings) -> EpisodeSpec:
        return EpisodeSpec(
            episode_id=episode.episode_id,
            attempt=episode.attempt,
            run_id=episode.run_id,
            group_id=episode.group_id,
            group_index=episode.group_index,
            group_size=episode.group_size,
            task=task,
            sampling=settings.sampling,
            max_turns=settings.max_turns,
            max_tokens=min(settings.max_tokens, self._context_length),
            wall_s=task.session_wall_s or self._wall_s,
        )
