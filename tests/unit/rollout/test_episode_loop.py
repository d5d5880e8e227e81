"""One episode: turns, tools, endings, and what is left behind."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from practicum.errors import EngineError, NotFound, SandboxError
from practicum.trajectory import MaskReason, Outcome, SamplingParams, Trajectory, VersionSpan
from services.rollout.chat import ChatTemplate
from services.rollout.engine.generation import FinishReason, Generation
from services.rollout.episode.loop import EpisodeRecord, EpisodeSpec, run_episode, unplayed
from services.rollout.episode.policy import Policy, ScriptedPolicy
from services.rollout.episode.sandbox import Sandbox, ToolAnswer
from services.rollout.tasks import Split, Task, TaskState
from tests.fixtures.chat_models import QWEN3, build_chat, reference_ids, reference_text
from tests.fixtures.rollout import ManualClock
from tests.fixtures.scripted_engine import turn_ids

TASK = Task(
    task_id="task_1",
    suite_id="suite_1",
    position=0,
    name="one",
    split=Split.TRAIN,
    instruction="Fix calc.py.",
    tools=("read_file", "run_tests", "finish"),
    tags=(),
    session_wall_s=0,
    spec=b"",
    reference=None,
    state=TaskState.ADMITTED,
)
SCHEMAS = {name: {"type": "function", "function": {"name": name}} for name in TASK.tools}


@dataclass
class TableSandboxes:
    """Sandboxes whose tools answer from a table, in this process."""

    answers: dict[str, ToolAnswer] = field(
        default_factory=lambda: {
            "read_file": ToolAnswer(output="return a - b", seconds=0.5),
            "run_tests": ToolAnswer(output="1 failed", seconds=0.5),
            "finish": ToolAnswer(output="", ends_episode=True),
        }
    )
    fail_at: str = ""  # open, a tool's name, or snapshot
    error: Callable[[], Exception] = lambda: SandboxError("the sandbox is gone")
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    num_open: int = 0

    @asynccontextmanager
    async def open(self, session_id: str, task: Task) -> AsyncIterator[Sandbox]:
        self._fail("open")
        self.num_open += 1
        try:
            yield self
        finally:
            self.num_open -= 1

    async def call_tool(self, call_id: str, name: str, arguments_json: str) -> ToolAnswer:
        self._fail(name)
        self.calls.append((call_id, name, arguments_json))
        return self.answers[name]

    async def snapshot(self) -> bytes:
        self._fail("snapshot")
        return b"diff"

    def _fail(self, place: str) -> None:
        if self.fail_at == place:
            raise self.error()


def spec_of(**changes: Any) -> EpisodeSpec:
    spec = EpisodeSpec(
        episode_id="ep_1",
        attempt=2,
        run_id="run_1",
        group_id="grp_1",
        group_index=7,
        group_size=8,
        task=TASK,
        sampling=SamplingParams(max_new_tokens=400),
        max_turns=6,
        max_tokens=3000,
        wall_s=60,
    )
    return replace(spec, **changes)


async def play(
    chat: ChatTemplate, policy: Policy, sandboxes: TableSandboxes | None = None, **changes: Any
) -> EpisodeRecord:
    return await run_episode(
        spec_of(**changes),
        policy=policy,
        sandboxes=sandboxes or TableSandboxes(),
        chat=chat,
        tools=SCHEMAS,
        clock=ManualClock(),
    )


def script(chat: ChatTemplate, *turns: Sequence[int]) -> ScriptedPolicy:
    return ScriptedPolicy([np.array(turn, dtype=np.int32) for turn in turns])


def sampled_text(trajectory: Trajectory, row: int = 0) -> str:
    held = trajectory.rows[row]
    return reference_text(held.token_ids_T[held.mask_T()])


async def test_episode_when_it_finishes_leaves_a_row_that_equals_the_rendered_conversation() -> None:
    chat, sandboxes = build_chat(), TableSandboxes()
    first = chat.render_tool_call("read_file", {"path": "calc.py"})
    policy = script(chat, turn_ids(chat, ("read_file", {"path": "calc.py"})), turn_ids(chat, ("finish", {})))
    record = await play(chat, policy, sandboxes)
    trajectory = record.trajectory
    trajectory.check()
    assert trajectory.outcome is Outcome.COMPLETED
    assert record.diff == b"diff"
    assert trajectory.trajectory_id == "ep_1-2"
    assert (trajectory.group_id, trajectory.group_index, trajectory.group_size) == ("grp_1", 7, 8)
    assert len(trajectory.rows) == 1
    row = trajectory.rows[0]
    text = reference_text(row.token_ids_T)
    assert text.endswith(
        f"<|im_start|>assistant\n{first}<|im_end|>\n<|im_start|>tool\nreturn a - b<|im_end|>\n"
        f"<|im_start|>assistant\n{chat.render_tool_call('finish', {})}<|im_end|>"
    )
    assert row.token_ids_T.tolist() == reference_ids(text)
    reasons = [span.reason for span in row.mask_spans]
    assert reasons[0] is MaskReason.PROMPT
    assert MaskReason.TOOL in reasons
    assert sampled_text(trajectory) == f"{first}<|im_end|>{chat.render_tool_call('finish', {})}<|im_end|>"
    assert sandboxes.calls == [
        ("0/call_0", "read_file", '{"path": "calc.py"}'),
        ("1/call_0", "finish", "{}"),
    ]
    assert [turn.tool_calls[0].result for turn in trajectory.turns] == ["return a - b", ""]
    assert sandboxes.num_open == 0


async def test_episode_when_a_turn_calls_no_tool_is_complete() -> None:
    chat = build_chat()
    record = await play(chat, script(chat, turn_ids(chat, text="It is fine.")))
    assert record.trajectory.outcome is Outcome.COMPLETED
    assert record.trajectory.turns[0].text == "It is fine."


async def test_episode_when_turns_run_out_is_truncated_without_the_last_answer() -> None:
    chat = build_chat()
    read = turn_ids(chat, ("read_file", {"path": "calc.py"}))
    record = await play(chat, script(chat, read, read), max_turns=2)
    trajectory = record.trajectory
    trajectory.check()
    assert trajectory.outcome is Outcome.TRUNCATED
    assert trajectory.rows[0].mask_spans[-1].reason is MaskReason.MODEL
    assert record.diff == b"diff", "what it reached is graded"


async def test_episode_when_a_turn_is_cut_runs_none_of_its_calls() -> None:
    chat, sandboxes = build_chat(), TableSandboxes()
    read = turn_ids(chat, ("read_file", {"path": "calc.py"}))
    policy = script(chat, read)
    record = await play(chat, policy, sandboxes, sampling=SamplingParams(max_new_tokens=len(read) - 1))
    assert record.trajectory.outcome is Outcome.TRUNCATED
    assert sandboxes.calls == []


async def test_episode_when_an_answer_fills_the_budget_is_truncated_before_it() -> None:
    chat = build_chat()
    sandboxes = TableSandboxes()
    sandboxes.answers["read_file"] = ToolAnswer(output="x" * 100_000)
    record = await play(chat, script(chat, turn_ids(chat, ("read_file", {"path": "calc.py"}))), sandboxes)
    assert record.trajectory.outcome is Outcome.TRUNCATED
    assert record.trajectory.rows[0].num_tokens < 3000


async def test_episode_when_the_policy_uses_its_wall_time_is_timed_out() -> None:
    chat = build_chat()
    tests = turn_ids(chat, ("run_tests", {}))
    sandboxes = TableSandboxes()
    sandboxes.answers["run_tests"] = ToolAnswer(output="killed", is_error=True, limit_hit="wall", seconds=40)
    record = await play(chat, script(chat, tests, tests, tests), sandboxes)
    assert record.trajectory.outcome is Outcome.TIMED_OUT
    assert len(record.trajectory.turns) == 2
    assert record.diff == b""


async def test_episode_when_timed_out_needs_no_sandbox_any_more() -> None:
    chat = build_chat()
    sandboxes = TableSandboxes(fail_at="snapshot")
    sandboxes.answers["run_tests"] = ToolAnswer(output="killed", is_error=True, limit_hit="wall", seconds=90)
    record = await play(chat, script(chat, turn_ids(chat, ("run_tests", {}))), sandboxes)
    assert record.trajectory.outcome is Outcome.TIMED_OUT


@dataclass
class SlowQueue:
    """A policy that waits long for a slot before each turn."""

    inner: ScriptedPolicy

    async def generate(self, prompt_ids_T: Any, *, request_id: str, max_new_tokens: int) -> Generation:
        generation = await self.inner.generate(
            prompt_ids_T, request_id=request_id, max_new_tokens=max_new_tokens
        )
        return replace(generation, waiting_s=500.0, generation_s=1.0)


async def test_episode_when_slots_are_scarce_is_not_timed_out() -> None:
    chat = build_chat()
    policy = SlowQueue(script(chat, turn_ids(chat, ("run_tests", {})), turn_ids(chat, ("finish", {}))))
    record = await play(chat, policy)
    assert record.trajectory.outcome is Outcome.COMPLETED
    assert record.trajectory.turns[0].waiting_s == 500.0


async def test_episode_when_the_policy_calls_wrongly_reads_why_and_goes_on() -> None:
    chat, sandboxes = build_chat(), TableSandboxes()
    broken = [int(i) for i in chat.tokenizer.encode_frame('<tool_call>\n{"name": \n</tool_call><|im_end|>')]
    policy = script(chat, broken, turn_ids(chat, ("rm", {})), turn_ids(chat, ("finish", {})))
    trajectory = (await play(chat, policy, sandboxes)).trajectory
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.tool_calls[0].is_error for turn in trajectory.turns] == [True, True, False]
    assert "there is no tool 'rm'" in trajectory.turns[1].tool_calls[0].result
    assert [call[1] for call in sandboxes.calls] == ["finish"]


async def test_episode_when_a_turn_has_calls_after_finish_runs_none_of_them() -> None:
    chat, sandboxes = build_chat(), TableSandboxes()
    policy = script(chat, turn_ids(chat, ("finish", {}), ("run_tests", {})))
    record = await play(chat, policy, sandboxes)
    assert record.trajectory.outcome is Outcome.COMPLETED
    assert [call[1] for call in sandboxes.calls] == ["finish"]


@pytest.mark.parametrize("place", ["open", "run_tests", "snapshot"])
async def test_episode_when_the_platform_fails_is_infra_failed_without_a_grade(place: str) -> None:
    chat = build_chat()
    policy = script(chat, turn_ids(chat, ("run_tests", {})), turn_ids(chat, ("finish", {})))
    trajectory = (await play(chat, policy, TableSandboxes(fail_at=place))).trajectory
    trajectory.check()
    assert trajectory.outcome is Outcome.INFRA_FAILED
    assert trajectory.reward is None
    assert trajectory.error == "sandbox: the sandbox is gone"


async def test_episode_when_a_defect_raises_passes_it_on_and_closes_the_sandbox() -> None:
    chat = build_chat()
    sandboxes = TableSandboxes(fail_at="run_tests", error=lambda: RuntimeError("a defect"))
    with pytest.raises(RuntimeError):
        await play(chat, script(chat, turn_ids(chat, ("run_tests", {}))), sandboxes)
    assert sandboxes.num_open == 0


class DeadEngine:
    """A policy whose engine is gone."""

    async def generate(self, prompt_ids_T: Any, *, request_id: str, max_new_tokens: int) -> Generation:
        raise EngineError("no engine")


async def test_episode_when_the_engine_is_gone_is_infra_failed() -> None:
    trajectory = (await play(build_chat(), DeadEngine())).trajectory
    assert (trajectory.outcome, trajectory.error) == (Outcome.INFRA_FAILED, "engine: no engine")
    assert trajectory.rows == ()


@dataclass
class Versions:
    """A policy that samples each turn under the next weight version."""

    turns: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    async def generate(self, prompt_ids_T: Any, *, request_id: str, max_new_tokens: int) -> Generation:
        self.prompts.append(prompt_ids_T.tolist())
        self.request_ids.append(request_id)
        version = len(self.prompts)
        ids = self.turns[version - 1]
        return Generation(
            request_id=request_id,
            token_ids_T=np.array(ids, dtype=np.int32),
            logprobs_T=np.full(len(ids), -version, dtype=np.float32),
            version_spans=(VersionSpan(start=0, end=len(ids), weight_version=version, engine_id="e"),),
            finish_reason=FinishReason.STOP,
        )


async def test_episode_when_versions_change_keeps_each_tokens_own() -> None:
    chat = build_chat()
    policy = Versions([turn_ids(chat, ("run_tests", {})), turn_ids(chat, ("finish", {}))])
    trajectory = (await play(chat, policy)).trajectory
    row = trajectory.rows[0]
    assert trajectory.version_range() == (1, 2)
    for version in (1, 2):
        assert set(row.logprobs_T[row.versions_T() == version]) == {-version}
    assert policy.prompts[1] == row.token_ids_T[: len(policy.prompts[1])].tolist()
    assert not policy.request_ids[1].startswith(policy.request_ids[0])


async def test_episode_when_the_template_rewrites_history_opens_a_row_that_is_the_prompt() -> None:
    chat = build_chat(QWEN3)
    assert not chat.report.appends_after_user or not chat.report.appends_after_tool
    thinking = [int(i) for i in chat.tokenizer.encode_frame("<think>\nhm\n</think>\n\n")]
    policy = Versions(
        [[*thinking, *turn_ids(chat, ("run_tests", {}))], [*thinking, *turn_ids(chat, ("finish", {}))]]
    )
    trajectory = (await play(chat, policy)).trajectory
    trajectory.check()
    last = trajectory.rows[-1]
    assert last.token_ids_T[: len(policy.prompts[1])].tolist() == policy.prompts[1]
    assert trajectory.num_trained_tokens == sum(len(turn) for turn in policy.turns), "each token once"


async def test_unplayed_when_cancelled_holds_the_prompt_and_nothing_to_train() -> None:
    chat = build_chat()
    record = unplayed(spec_of(), outcome=Outcome.CANCELLED, error="cancelled", chat=chat, clock=ManualClock())
    record.trajectory.check()
    assert record.trajectory.num_trained_tokens == 0
    failed = unplayed(spec_of(), outcome=Outcome.INFRA_FAILED, error="x", chat=chat, clock=ManualClock())
    failed.trajectory.check()
    assert failed.trajectory.rows == ()


async def test_script_when_asked_for_more_says_so() -> None:
    policy = ScriptedPolicy([])
    with pytest.raises(ValueError, match="0 turns"):
        await policy.generate(np.zeros(1, dtype=np.int32), request_id="r/", max_new_tokens=1)


async def test_session_when_lost_is_the_platforms_fault() -> None:
    chat = build_chat()
    sandboxes = TableSandboxes(fail_at="run_tests", error=lambda: NotFound("no session"))
    record = await play(chat, script(chat, turn_ids(chat, ("run_tests", {}))), sandboxes)
    assert record.trajectory.outcome is Outcome.INFRA_FAILED
