"""One episode, from the first prompt to a sealed trajectory.

Owns the order of things: prompt, turn, tools, next prompt. Never retries, stores or grades. A failed
episode is data: a platform error becomes the outcome `infra_failed` with no grade, while running out of
turns, tokens or the task's wall time is the policy's doing. The wall time counts generation and tools,
not the wait for a slot, which the policy cannot help.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from practicum.clock import Clock
from practicum.errors import PracticumError
from practicum.trajectory import Outcome, SamplingParams, ToolCall, Trajectory, Turn
from services.rollout.chat import (
    CallProblem,
    ChatTemplate,
    Message,
    ParsedTurn,
    Role,
    ToolSchema,
    unknown_tool_message,
)
from services.rollout.engine.generation import FinishReason, Generation
from services.rollout.episode.policy import Policy
from services.rollout.episode.sandbox import Sandbox, Sandboxes
from services.rollout.ledger import Ledger, TokenBudget
from services.rollout.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Everything that is settled before an attempt begins."""

    episode_id: str
    attempt: int
    run_id: str  # empty for an evaluation
    group_id: str
    group_index: int
    group_size: int
    task: Task
    sampling: SamplingParams
    max_turns: int
    max_tokens: int
    wall_s: float

    @property
    def trajectory_id(self) -> str:
        """Unique per attempt."""
        return f"{self.episode_id}-{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """What an attempt leaves behind."""

    trajectory: Trajectory
    diff: bytes  # a serialised `WorkspaceDiff`; empty where no snapshot was taken


@dataclass(slots=True)
class _Progress:
    """What grows while an attempt runs."""

    ledger: Ledger
    budget: TokenBudget
    created_at: datetime
    messages: list[Message]
    schemas: tuple[ToolSchema, ...]
    turns: list[Turn] = field(default_factory=list)
    used_s: float = 0.0


async def run_episode(
    spec: EpisodeSpec,
    *,
    policy: Policy,
    sandboxes: Sandboxes,
    chat: ChatTemplate,
    tools: Mapping[str, ToolSchema],
    clock: Clock,
) -> EpisodeRecord:
    """Run one attempt. Never raises a `PracticumError`; a cancellation passes through."""
    progress = _Progress(
        ledger=Ledger(vocab_size=chat.tokenizer.vocab_size),
        budget=TokenBudget(max_context_tokens=spec.max_tokens),
        created_at=clock.now(),
        messages=[Message(role=Role.USER, content=spec.task.instruction)],
        schemas=tuple(tools[name] for name in spec.task.tools if name in tools),
    )
    try:
        progress.ledger.open(chat.open(progress.messages, progress.schemas))
        async with sandboxes.open(spec.trajectory_id, spec.task) as sandbox:
            outcome = await _take_turns(spec, progress, policy, sandbox, chat)
            # Work past its time counts for nothing, and its sandbox may have ended with the time.
            diff = b"" if outcome is Outcome.TIMED_OUT else await sandbox.snapshot()
    except PracticumError as error:
        failure = f"{error.code}: {error}"
        return EpisodeRecord(
            trajectory=_seal(spec, progress, chat, clock, Outcome.INFRA_FAILED, failure), diff=b""
        )
    return EpisodeRecord(trajectory=_seal(spec, progress, chat, clock, outcome), diff=diff)


async def _take_turns(
    spec: EpisodeSpec, progress: _Progress, policy: Policy, sandbox: Sandbox, chat: ChatTemplate
) -> Outcome:
    ledger = progress.ledger
    for index in range(spec.max_turns):
        num_new = progress.budget.num_new_tokens_allowed(ledger.num_tokens, spec.sampling.max_new_tokens)
        if num_new == 0:
            return Outcome.TRUNCATED
        num_prompt = ledger.num_tokens
        generation = await policy.generate(
            ledger.prompt_ids(), request_id=f"{spec.trajectory_id}/{index}/", max_new_tokens=num_new
        )
        ledger.append_sampled(generation.token_ids_T, generation.logprobs_T, generation.version_spans)
        is_cut = generation.finish_reason is not FinishReason.STOP
        text = chat.tokenizer.decode(generation.token_ids_T)
        parsed = chat.parse_turn(text, is_cut=is_cut)
        calls, answers, ends = await _use_tools(spec, index, parsed, sandbox)
        turn = _turn(index, text, calls, generation, num_prompt)
        progress.turns.append(turn)
        progress.used_s += turn.generation_s + turn.tools_s
        if is_cut:
            return Outcome.TRUNCATED
        if ends or not parsed.items:
            return Outcome.COMPLETED
        if progress.used_s > spec.wall_s:
            return Outcome.TIMED_OUT
        progress.messages += [Message(role=Role.ASSISTANT, content=text), *answers]
        # An answer that leaves no room for another turn would only lengthen the training row.
        if index + 1 == spec.max_turns or not _extend_prompt(progress, generation, answers, chat):
            return Outcome.TRUNCATED
    return Outcome.TRUNCATED


async def _use_tools(
    spec: EpisodeSpec, index: int, parsed: ParsedTurn, sandbox: Sandbox
) -> tuple[list[ToolCall], list[Message], bool]:
    """Run a turn's calls in order; (calls for people, messages for the policy, whether the episode ends)."""
    calls: list[ToolCall] = []
    answers: list[Message] = []
    for item in parsed.items:
        ends, seconds = False, 0.0
        if isinstance(item, CallProblem):
            output, is_error, arguments_json = item.message, True, ""
        elif item.name not in spec.task.tools:
            output, is_error = unknown_tool_message(item.name, spec.task.tools), True
            arguments_json = item.arguments_json
        else:
            arguments_json = item.arguments_json
            answer = await sandbox.call_tool(f"{index}/{item.call_id}", item.name, arguments_json)
            output, is_error, ends, seconds = (
                answer.output,
                answer.is_error,
                answer.ends_episode,
                answer.seconds,
            )
        calls.append(
            ToolCall(
                name=item.name,
                arguments_json=arguments_json,
                result=output,
                is_error=is_error,
                seconds=seconds,
            )
        )
        answers.append(Message(role=Role.TOOL, content=output, name=item.name, call_id=item.call_id))
        if ends:
            return calls, answers, True
    return calls, answers, False


def _extend_prompt(
    progress: _Progress, generation: Generation, answers: Sequence[Message], chat: ChatTemplate
) -> bool:
    """Append the tools' answers for the next turn; False, with nothing appended, where no turn would fit."""
    ledger, budget = progress.ledger, progress.budget
    if not chat.appends(answers):
        prompt_ids_T = chat.open(progress.messages, progress.schemas)
        if budget.num_new_tokens_allowed(len(prompt_ids_T), 1) == 0:
            return False
        ledger.replace_prompt(prompt_ids_T)
        return True
    last_id = int(generation.token_ids_T[-1]) if len(generation.token_ids_T) else None
    pieces = chat.delta(answers, last_sampled_id=last_id)
    num_added = sum(len(piece.ids) for piece in pieces)
    if budget.num_new_tokens_allowed(ledger.num_tokens + num_added, 1) == 0:
        return False
    for piece in pieces:
        ledger.append_context(piece.ids, piece.reason)
    return True


def _turn(index: int, text: str, calls: list[ToolCall], generation: Generation, num_prompt: int) -> Turn:
    return Turn(
        index=index,
        text=text,
        tool_calls=tuple(calls),
        engine_request_id=generation.request_id,
        finish_reason=generation.finish_reason,
        num_prompt_tokens=num_prompt,
        num_sampled_tokens=len(generation.token_ids_T),
        generation_s=generation.generation_s,
        tools_s=sum(call.seconds for call in calls),
        waiting_s=generation.waiting_s,
    )


def _seal(
    spec: EpisodeSpec,
    progress: _Progress,
    chat: ChatTemplate,
    clock: Clock,
    outcome: Outcome,
    error: str = "",
) -> Trajectory:
    has_tokens = bool(progress.turns) or outcome is not Outcome.INFRA_FAILED
    return Trajectory(
        trajectory_id=spec.trajectory_id,
        run_id=spec.run_id,
        task_id=spec.task.task_id,
        group_id=spec.group_id,
        group_index=spec.group_index,
        group_size=spec.group_size,
        episode_id=spec.episode_id,
        attempt=spec.attempt,
        rows=progress.ledger.rows() if has_tokens else (),
        turns=tuple(progress.turns),
        outcome=outcome,
        grade=None,
        sampling=spec.sampling,
        template_fingerprint=chat.fingerprint,
        tokenizer_fingerprint=chat.tokenizer.fingerprint,
        created_at=progress.created_at,
        finished_at=clock.now(),
        error=error,
    ).sealed()


def unplayed(
    spec: EpisodeSpec, *, outcome: Outcome, error: str, chat: ChatTemplate, clock: Clock
) -> EpisodeRecord:
    """The record of an attempt that left nothing to train: its rows are at most the first prompt."""
    progress = _Progress(
        ledger=Ledger(vocab_size=chat.tokenizer.vocab_size),
        budget=TokenBudget(max_context_tokens=spec.max_tokens),
        created_at=clock.now(),
        messages=[Message(role=Role.USER, content=spec.task.instruction)],
        schemas=(),
    )
    if outcome is not Outcome.INFRA_FAILED:
        progress.ledger.open(chat.open(progress.messages))
    return EpisodeRecord(trajectory=_seal(spec, progress, chat, clock, outcome, error), diff=b"")
