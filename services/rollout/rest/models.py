"""Request and answer bodies. Unknown fields are refused; every text can be stored by every database.

What the reward service would refuse later is refused here, while the caller still listens: its bounds on
files, limits and grading time are repeated below, since the services import nothing of each other.
"""

import json
import math
import warnings
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from practicum.rest.models import ApiModel
from services.rollout.rest.workspaces import MAX_FILES, check_files, check_path, check_storable, unpack_tar
from services.rollout.rpc.taskspec import File, Grading, Limits, Reference
from services.rollout.store.demonstrations import ScriptedTurn
from services.rollout.tasks import Split, TaskState

MAX_TASK_BYTES = 64 * 1024 * 1024  # workspace, grader and reference together
MAX_GRADER_TIMEOUT_S = 900.0
LIMIT_BOUNDS: dict[str, tuple[float, float]] = {
    "session_wall_s": (0.1, 4 * 3600.0),
    "call_wall_s": (0.1, 900.0),
    "cpu_s": (1.0, 900.0),
    "memory_bytes": (128 << 20, 8192 << 20),
    "num_processes": (1, 512),
    "file_size_bytes": (4096, 256 << 20),
    "output_bytes": (256, 4 << 20),
}

Text = Annotated[str, AfterValidator(check_storable)]
Name = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:+ -]*$"),
    AfterValidator(check_storable),
]
Path = Annotated[str, AfterValidator(check_path)]


def _checked(files: dict[str, str]) -> dict[str, str]:
    check_files(files)
    return files


def _limit(name: str, description: str) -> Any:
    low, high = LIMIT_BOUNDS[name]
    return Field(default=0, ge=0, le=high, description=f"{description} 0, or at least {low:.10g}.")


# Checked as one value, so that an error names the field and not a key that may not even be text.
Files = Annotated[dict[str, str], AfterValidator(_checked)]


class AdmissionMode(StrEnum):
    """Whether tasks are checked before they are used."""

    CHECK = "check"
    SKIP = "skip"


class GraderKind(StrEnum):
    """How a task is graded."""

    TESTS = "tests"


class WorkspaceModel(ApiModel):
    """The files the policy works on; one of the two forms."""

    files: Files | None = Field(
        default=None,
        description="Text by relative path.",
        examples=[{"calc.py": "def add(a, b):\n    return a - b\n"}],
    )
    tar_base64: str | None = Field(
        default=None, description="A tar archive, plain or compressed, in base64; regular files only."
    )

    @field_validator("tar_base64")
    @classmethod
    def _check_tar(cls, packed: str | None) -> str | None:
        if packed is not None:
            unpack_tar(packed)
        return packed

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.files is None) == (self.tar_base64 is None):
            raise ValueError("give either files or tar_base64")
        return self

    def as_files(self) -> tuple[File, ...]:
        """The files, whatever the form."""
        if self.tar_base64 is not None:
            return unpack_tar(self.tar_base64)
        return _as_files(self.files or {})


class GraderModel(ApiModel):
    """How the task is graded; never shown to the policy."""

    kind: GraderKind = Field(description="`tests`: hidden tests in a clean sandbox.", examples=["tests"])
    files: Files = Field(
        description="Files that are added after the policy's changes; one of them at least is `test_*.py` "
        "or `*_test.py`, and those are valid Python.",
        examples=[{"test_hidden.py": "from calc import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"}],
    )
    editable: list[Text] = Field(
        default=["**"],
        min_length=1,
        max_length=1000,
        description="Globs of the paths whose changes count.",
        examples=[["calc.py"]],
    )
    timeout_s: float = Field(
        default=10, gt=0, le=MAX_GRADER_TIMEOUT_S, description="Wall time of the hidden tests, in seconds."
    )

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, str]) -> dict[str, str]:
        # `tests` is the only kind there is; another kind brings its own demand.
        tests = {path: text for path, text in files.items() if _is_test(path)}
        if not tests:
            raise ValueError("a grader of kind tests needs a test_*.py or *_test.py file")
        for path, text in tests.items():
            if error := _syntax_error(path, text):
                raise ValueError(f"a test file is no valid Python: {error}")
        return files


class LimitsModel(ApiModel):
    """What the task's sandboxes may use; 0 is the service's default."""

    session_wall_s: float = _limit("session_wall_s", "Wall time of an episode's sandbox, in seconds.")
    call_wall_s: float = _limit("call_wall_s", "Wall time of one tool call, in seconds.")
    cpu_s: float = _limit("cpu_s", "Processor time of one tool call, in seconds.")
    memory_bytes: int = _limit("memory_bytes", "Memory of all processes together.")
    num_processes: int = _limit("num_processes", "Processes and threads at once.")
    file_size_bytes: int = _limit("file_size_bytes", "The largest file that may be written.")
    output_bytes: int = _limit("output_bytes", "Output of one tool call; the rest is cut.")

    @field_validator("*")
    @classmethod
    def _check_bounds(cls, value: float, info: ValidationInfo) -> float:
        assert info.field_name is not None
        low, high = LIMIT_BOUNDS[info.field_name]
        # Written so that a value that is no number at all fails too.
        if value != 0 and not low <= value <= high:
            raise ValueError(f"give 0 for the default, or {low:.10g} to {high:.10g}")
        return value


class ReferenceModel(ApiModel):
    """A solution that passes; used at admission, never shown to the policy."""

    files: Files = Field(
        default={},
        description="Files it adds or changes, whole.",
        examples=[{"calc.py": "def add(a, b):\n    return a + b\n"}],
    )
    removed: list[Path] = Field(
        default=[], max_length=MAX_FILES, description="Paths it removes.", examples=[["old.py"]]
    )

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if both := sorted(self.files.keys() & set(self.removed)):
            raise ValueError(f"{both[0]!r} is both changed and removed")
        return self


class TaskModel(ApiModel):
    """One problem."""

    name: Name = Field(description="Unique in its suite.", examples=["add-is-wrong"])
    split: Split = Field(
        description="`train` is sampled by runs, `heldout` by evaluations.", examples=["train"]
    )
    instruction: Text = Field(
        min_length=1,
        max_length=1_000_000,
        description="What the policy is asked to do.",
        examples=["Fix calc.py."],
    )
    workspace: WorkspaceModel = Field(description="The files the policy works on.")
    tools: list[Text] = Field(
        min_length=1,
        max_length=64,
        description="Names of the tools the policy may call, as the reward service offers them.",
        examples=[["read_file", "edit_file", "run_tests", "finish"]],
    )
    grader: GraderModel = Field(description="How the policy's work is graded; never shown to it.")
    limits: LimitsModel = Field(default=LimitsModel(), description="What its sandboxes may use.")
    tags: list[Text] = Field(
        default=[], max_length=64, description="Words to find and count tasks by.", examples=[["kind:sign"]]
    )
    reference: ReferenceModel | None = Field(
        default=None, description="A solution that passes, checked at admission; null where there is none."
    )

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        solution = self.reference.files if self.reference is not None else {}
        size_bytes = sum(len(file.content) for file in self.workspace.as_files())
        size_bytes += sum(
            len(text.encode()) for files in (self.grader.files, solution) for text in files.values()
        )
        if size_bytes > MAX_TASK_BYTES:
            raise ValueError(
                f"workspace, grader and reference hold {size_bytes} bytes together; "
                f"at most {MAX_TASK_BYTES} are accepted"
            )
        return self

    def grading(self) -> Grading:
        """The grader as a value."""
        return Grading(
            kind=self.grader.kind,
            files=_as_files(self.grader.files),
            editable=tuple(self.grader.editable),
            timeout_s=self.grader.timeout_s,
        )

    def sandbox_limits(self) -> Limits:
        """The limits as a value."""
        return Limits(**self.limits.model_dump())

    def solution(self) -> Reference | None:
        """The reference solution as a value; None = none was given."""
        if self.reference is None:
            return None
        return Reference(files=_as_files(self.reference.files), removed=tuple(self.reference.removed))


_TASK_EXAMPLE: dict[str, Any] = {
    "name": "add-is-wrong",
    "split": "train",
    "instruction": "Fix calc.py.",
    "workspace": {"files": {"calc.py": "def add(a, b):\n    return a - b\n"}},
    "tools": ["read_file", "edit_file", "run_tests", "finish"],
    "grader": {
        "kind": "tests",
        "files": {"test_hidden.py": "from calc import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"},
        "editable": ["calc.py"],
        "timeout_s": 10,
    },
    "reference": {"files": {"calc.py": "def add(a, b):\n    return a + b\n"}},
    "tags": ["kind:sign"],
}


class SuiteRequest(ApiModel):
    """A suite with all its tasks."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"name": "first-bugs", "version": "1", "tasks": [_TASK_EXAMPLE]}]},
    )

    name: Name = Field(description="For people and for runs.", examples=["first-bugs"])
    version: Name = Field(examples=["1"], description="A new set of tasks needs a new version.")
    tasks: list[TaskModel] = Field(
        min_length=1, max_length=20_000, description="All its tasks, in their order."
    )
    admission: AdmissionMode = Field(
        default=AdmissionMode.CHECK, description="`skip` trusts the tasks as they are."
    )

    @field_validator("tasks")
    @classmethod
    def _unique_names(cls, tasks: list[TaskModel]) -> list[TaskModel]:
        seen: set[str] = set()
        for index, task in enumerate(tasks):
            if task.name in seen:
                raise ValueError(f"tasks[{index}].name {task.name!r} occurs twice")
            seen.add(task.name)
        return tasks


class TaskRequest(TaskModel):
    """A task to be added to a suite."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"suite": "first-bugs", **_TASK_EXAMPLE}]}
    )

    suite: Text = Field(description="Id, name, or name@version of a suite.", examples=["first-bugs"])
    admission: AdmissionMode = Field(
        default=AdmissionMode.CHECK, description="`skip` trusts the task as it is."
    )


class TaskCounts(ApiModel):
    """Tasks of a split by state."""

    admitting: int = Field(default=0, description="Tasks that wait for their verdict.")
    admitted: int = Field(default=0, description="Tasks that may be used.")
    rejected: int = Field(default=0, description="Tasks that are never used.")


class SuiteView(ApiModel):
    """A suite as it stands."""

    suite_id: str = Field(description="The suite.", examples=["suite_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"])
    name: str = Field(description="Its name.", examples=["first-bugs"])
    version: str = Field(description="Its version.", examples=["1"])
    created_at: datetime = Field(description="When it was stored.")
    train: TaskCounts = Field(description="Tasks that runs sample, by state.")
    heldout: TaskCounts = Field(description="Tasks that evaluations sample, by state.")
    ready: bool = Field(description="True where every task has its verdict.")


class TaskView(ApiModel):
    """A task as it stands; hidden tests and the reference are not shown."""

    task_id: str = Field(description="The task.", examples=["task_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"])
    suite_id: str = Field(description="Its suite.")
    name: str = Field(description="Its name, unique in the suite.")
    split: Split = Field(description="`train` is sampled by runs, `heldout` by evaluations.")
    instruction: str = Field(description="What the policy is asked to do.")
    files: list[str] = Field(description="Paths of the workspace.")
    tools: list[str] = Field(description="Names of the tools the policy may call.")
    grader: str = Field(description="The kind of its grader.", examples=["tests"])
    editable: list[str] = Field(description="Globs of the paths whose changes count.")
    tags: list[str] = Field(description="Words to find and count tasks by.")
    state: TaskState = Field(description="Whether it may be used.")
    reasons: list[dict[str, Any]] = Field(description="The admission checks: name, ok, detail.")


class EvaluationRequest(ApiModel):
    """Samples tasks of a suite with the weights served now, and grades them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"suite": "first-bugs", "split": "heldout", "num_tasks": 100, "temperature": 1.0, "seed": 0}
            ]
        },
    )

    suite: Text = Field(description="Id, name, or name@version.", examples=["first-bugs"])
    split: Split = Field(default=Split.HELDOUT, description="The part of the suite that is drawn from.")
    num_tasks: int = Field(ge=1, le=20_000, description="Tasks that are drawn.", examples=[100])
    episodes_per_task: int = Field(default=1, ge=1, le=256, description="Episodes of each drawn task.")
    temperature: float = Field(default=1.0, ge=0, le=10, description="Sampling temperature; 0 is greedy.")
    max_turns: int = Field(default=6, ge=1, le=1000, description="Turns an episode may take.")
    max_tokens: int = Field(
        default=512, ge=1, le=1 << 24, description="Tokens an episode may hold, prompts included."
    )
    max_new_tokens: int = Field(default=96, ge=1, le=1 << 20, description="Tokens a turn may sample.")
    seed: int = Field(default=0, ge=0, le=(1 << 62), description="The same seed draws the same tasks.")

    @field_validator("temperature")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value


class EvaluationCreated(ApiModel):
    """Where to ask for the result."""

    evaluation_id: str = Field(
        description="The evaluation.", examples=["eval_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"]
    )


class EvaluationView(ApiModel):
    """An evaluation and its sums so far."""

    evaluation_id: str = Field(description="The evaluation.")
    state: str = Field(description="running or completed.")
    suite_id: str = Field(description="The suite it draws from.")
    request: dict[str, Any] = Field(description="As it was asked for, defaults filled in.")
    num_episodes: int = Field(description="Episodes in all.")
    num_done: int = Field(description="Episodes that have ended.")
    num_passed: int = Field(description="Episodes with the whole reward.")
    infra_failed: int = Field(description="Episodes the platform failed; they are in no rate.")
    success_rate: float | None = Field(description="Passed over graded; null where none is graded.")
    wilson_low: float | None = Field(description="Lower end of the rate's 95 % interval; null with it.")
    wilson_high: float | None = Field(description="Upper end of the rate's 95 % interval; null with it.")
    mean_turns: float | None = Field(description="Turns an ended episode took; null where none has ended.")
    tokens_generated: int = Field(description="Tokens the policy sampled.")
    weight_version: int | None = Field(description="Served when it began; null before.")
    engine_utilisation: float | None = Field(
        description="Share of slot time spent generating meanwhile; null until all is played."
    )
    seconds: float = Field(description="Wall time, until now or until it was completed.")
    created_at: datetime = Field(description="When it was asked for.")


class ScriptedCall(ApiModel):
    """A tool call of a script."""

    name: Text = Field(min_length=1, max_length=200, description="The tool.", examples=["read_file"])
    arguments: dict[str, JsonValue] = Field(
        description="Its arguments by name.", examples=[{"path": "calc.py"}]
    )

    @field_validator("arguments")
    @classmethod
    def _is_text(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("holds half a character (a lone surrogate)") from error
        return arguments


class ScriptedTurnModel(ApiModel):
    """One turn of a script."""

    text: Text = Field(
        default="", description="What is said before the calls.", examples=["I read it first."]
    )
    tool_calls: list[ScriptedCall] = Field(
        default=[], max_length=1000, description="The calls of the turn, in order."
    )

    def as_turn(self) -> ScriptedTurn:
        """The turn as a value."""
        calls = tuple((call.name, dict[str, object](call.arguments)) for call in self.tool_calls)
        return ScriptedTurn(text=self.text, tool_calls=calls)


class DemonstrationModel(ApiModel):
    """One scripted episode."""

    task: Text = Field(description="Id or name of an admitted task.", examples=["add-is-wrong"])
    turns: list[ScriptedTurnModel] = Field(
        min_length=1, max_length=1000, description="The script, turn by turn."
    )


_DEMONSTRATIONS_EXAMPLE: dict[str, Any] = {
    "run_id": "run_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f",
    "suite": "first-bugs",
    "demonstrations": [
        {
            "task": "add-is-wrong",
            "turns": [
                {"tool_calls": [{"name": "read_file", "arguments": {"path": "calc.py"}}]},
                {
                    "text": "It subtracts.",
                    "tool_calls": [
                        {
                            "name": "edit_file",
                            "arguments": {"path": "calc.py", "old": "a - b", "new": "a + b"},
                        }
                    ],
                },
                {"tool_calls": [{"name": "finish", "arguments": {}}]},
            ],
        }
    ],
}


class DemonstrationsRequest(ApiModel):
    """Scripted episodes for a run that learns from them."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [_DEMONSTRATIONS_EXAMPLE]})

    run_id: Text = Field(
        min_length=1,
        max_length=64,
        description="The run that learns from them.",
        examples=["run_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"],
    )
    suite: Text | None = Field(
        default=None, description="Where names are looked up; needed if they are ambiguous."
    )
    demonstrations: list[DemonstrationModel] = Field(
        min_length=1, max_length=50_000, description="The scripted episodes."
    )


class DemonstrationsCreated(ApiModel):
    """Where to ask for the progress."""

    demonstration_id: str = Field(
        description="The set of demonstrations.", examples=["demo_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"]
    )
    num_episodes: int = Field(description="Episodes that will be played.")


class DemonstrationsView(ApiModel):
    """How far a set of demonstrations is."""

    demonstration_id: str = Field(description="The set of demonstrations.")
    run_id: str = Field(description="The run that learns from them.")
    state: str = Field(description="running or completed.")
    num_episodes: int = Field(description="Episodes in all.")
    num_done: int = Field(description="Sent to the trainer.")
    num_failed: int = Field(description="The platform failed, or the task was not admitted.")
    created_at: datetime = Field(description="When it was asked for.")


class EngineView(ApiModel):
    """One engine."""

    engine_id: str = Field(description="The engine.", examples=["engine-0"])
    url: str = Field(description="Where it is reached.", examples=["http://127.0.0.1:30000"])
    healthy: bool = Field(description="Whether it gets requests.")
    weight_version: int = Field(description="What it serves; -1 where it was not reached yet.")
    slots: int = Field(description="Requests it takes at once.")
    num_in_flight: int = Field(description="Requests it has now.")
    busy_slot_seconds: float = Field(description="Slot time spent generating since the service's start.")
    seconds: float = Field(description="Wall time since the service's start, without pauses.")
    utilisation: float = Field(description="busy_slot_seconds / (slots · seconds).")
    tokens_generated: int = Field(description="Tokens it sampled since the service's start.")
    paused_seconds: float = Field(description="Time it was paused for publishing.")


class EnginesView(ApiModel):
    """Every engine and what is served."""

    run_id: str = Field(description="Whose weights; empty for the model the engines started with.")
    weight_version: int = Field(description="The version that is served; 0 is the base.")
    items: list[EngineView] = Field(description="Every engine.")


class ReasonSpan(ApiModel):
    """Tokens [start, end) that share a mask reason."""

    start: int = Field(description="The first token.")
    end: int = Field(description="The token after the last.")
    reason: str = Field(
        description="Why they are trained or not; only `model` enters the loss.", examples=["model"]
    )


class WeightSpan(ApiModel):
    """Sampled tokens [start, end) of one weight version."""

    start: int = Field(description="The first token.")
    end: int = Field(description="The token after the last.")
    weight_version: int = Field(description="The version that sampled them.")
    engine_id: str = Field(description="The engine that sampled them.")


class RowView(ApiModel):
    """One training sequence, token by token."""

    token_ids: list[int] = Field(description="The tokens.")
    logprobs: list[float] = Field(description="Under the sampling distribution; 0 where not sampled.")
    reasons: list[ReasonSpan] = Field(description="Mask reasons; they cover every token.")
    weight_versions: list[WeightSpan] = Field(description="Versions of the sampled tokens.")


class EpisodeView(ApiModel):
    """An episode without its tokens."""

    episode_id: str = Field(description="The episode.", examples=["ep_0197f0c2a1b27c3d8e4f5a6b7c8d9e0f"])
    task_id: str = Field(description="Its task.")
    run_id: str = Field(description="Its run; empty for an evaluation.")
    group_id: str = Field(description="Its group.")
    group_index: int = Field(description="The group's number in its run, evaluation or demonstrations.")
    evaluation_id: str | None = Field(description="Its evaluation; null where it belongs to none.")
    demonstration_id: str | None = Field(
        description="Its set of demonstrations; null where it belongs to none."
    )
    owner: str | None = Field(
        description="The replica that plays it, or ended it; null while none does. One that is gone frees it."
    )
    attempt: int = Field(description="The number of its last attempt, from 1; 0 where none was begun.")
    state: str = Field(description="running, grading, graded, recorded, infra_failed or cancelled.")
    outcome: str | None = Field(
        description="completed, truncated, timed_out, cancelled, infra_failed or tampered; null before."
    )
    reward: float | None = Field(description="null: not graded, which is never 0.")
    error: str = Field(description="What the platform failed at; empty where it did not.")
    num_turns: int = Field(description="Turns of the attempt that ended it.")
    num_sampled_tokens: int = Field(description="Tokens the policy sampled in that attempt.")
    created_at: datetime = Field(description="When it was stored.")
    updated_at: datetime = Field(description="When it last changed.")


class EpisodeDetail(EpisodeView):
    """An episode with its turns and rows, from the attempt that ended it."""

    turns: list[dict[str, Any]] = Field(description="For people; never training data.")
    rows: list[RowView] = Field(description="The training sequences; empty until it has ended.")
    grade: dict[str, Any] | None = Field(
        description="Reward, components, tests and evidence; null until it is graded."
    )
    sampling: dict[str, Any] | None = Field(description="The sampling parameters; null until it has ended.")


def _is_test(path: str) -> bool:
    # What pytest collects, and the reward service runs.
    name = path.rsplit("/", 1)[-1]
    return (name.startswith("test_") and name.endswith(".py")) or name.endswith("_test.py")


def _syntax_error(path: str, text: str) -> str:
    """Why a file is no Python; empty where it is."""
    try:
        with warnings.catch_warnings(action="ignore"):
            # More than parsing: also what only the compiler sees, like a `return` outside a function.
            compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{path}, line {error.lineno}: {error.msg}"
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # U+0000, or nested too deep
        return f"{path}: {error or type(error).__name__}"
    return ""


def _as_files(files: dict[str, str]) -> tuple[File, ...]:
    return tuple(File(path=path, content=text.encode()) for path, text in files.items())
