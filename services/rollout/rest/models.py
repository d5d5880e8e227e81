"""Request and answer bodies. Unknown fields are refused; every text can be stored by every database."""

import math
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from practicum.rest.models import ApiModel
from services.rollout.rest.workspaces import (
    MAX_FILES,
    MAX_WORKSPACE_BYTES,
    check_path,
    check_tree,
    unpack_tar,
)
from services.rollout.rpc.taskspec import File, Grading, Limits, Reference
from services.rollout.store.demonstrations import ScriptedTurn
from services.rollout.tasks import Split, TaskState


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("holds the character U+0000")
    return text


Text = Annotated[str, AfterValidator(_storable)]
Name = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:+ -]*$"),
    AfterValidator(_storable),
]
Path = Annotated[str, AfterValidator(check_path)]
Files = dict[Path, str]


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
        description="Text by path.",
        examples=[{"calc.py": "def add(a, b):\n    return a - b\n"}],
    )
    tar_base64: str | None = Field(
        default=None, description="A tar archive, plain or compressed, in base64; regular files only."
    )

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: Files | None) -> Files | None:
        if files is not None:
            _check_size(files)
            check_tree(files)
        return files

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
        description="Files that are added after the policy's changes.",
        examples=[{"test_hidden.py": "from calc import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"}],
    )
    editable: list[Text] = Field(
        default=["**"], description="Globs of the paths whose changes count.", examples=[["calc.py"]]
    )
    timeout_s: float = Field(default=10, gt=0, le=3600, description="Wall time of grading.")

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: Files) -> Files:
        if not files:
            raise ValueError("a grader of kind tests needs at least one file")
        _check_size(files)
        check_tree(files)
        return files


class LimitsModel(ApiModel):
    """What the task's sandboxes may use; 0 is the service's default."""

    session_wall_s: float = Field(default=0, ge=0, le=86_400)
    call_wall_s: float = Field(default=0, ge=0, le=86_400)
    cpu_s: float = Field(default=0, ge=0, le=86_400)
    memory_bytes: int = Field(default=0, ge=0, le=1 << 40)
    num_processes: int = Field(default=0, ge=0, le=100_000)
    file_size_bytes: int = Field(default=0, ge=0, le=1 << 40)
    output_bytes: int = Field(default=0, ge=0, le=1 << 30)


class ReferenceModel(ApiModel):
    """A solution that passes; used at admission, never shown to the policy."""

    files: Files = Field(default={}, description="Files it adds or changes, whole.")
    removed: list[Path] = Field(default=[], description="Paths it removes.")


class TaskModel(ApiModel):
    """One problem."""

    name: Name = Field(description="Unique in its suite.", examples=["add-is-wrong"])
    split: Split = Field(description="`train` is sampled by runs, `heldout` by evaluations.")
    instruction: Text = Field(min_length=1, max_length=1_000_000, examples=["Fix calc.py."])
    workspace: WorkspaceModel
    tools: list[Text] = Field(
        min_length=1, max_length=64, examples=[["read_file", "edit_file", "run_tests", "finish"]]
    )
    grader: GraderModel
    limits: LimitsModel = LimitsModel()
    tags: list[Text] = Field(default=[], max_length=64)
    reference: ReferenceModel | None = None

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


class SuiteRequest(ApiModel):
    """A suite with all its tasks."""

    name: Name = Field(examples=["first-bugs"])
    version: Name = Field(examples=["1"], description="A new set of tasks needs a new version.")
    tasks: list[TaskModel] = Field(min_length=1, max_length=20_000)
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

    suite: Text = Field(description="Id, name, or name@version of a suite.", examples=["first-bugs"])
    admission: AdmissionMode = AdmissionMode.CHECK


class TaskCounts(ApiModel):
    """Tasks of a split by state."""

    admitting: int = 0
    admitted: int = 0
    rejected: int = 0


class SuiteView(ApiModel):
    """A suite as it stands."""

    suite_id: str
    name: str
    version: str
    created_at: datetime
    train: TaskCounts
    heldout: TaskCounts
    ready: bool = Field(description="True where every task has its verdict.")


class TaskView(ApiModel):
    """A task as it stands; hidden tests and the reference are not shown."""

    task_id: str
    suite_id: str
    name: str
    split: Split
    instruction: str
    files: list[str] = Field(description="Paths of the workspace.")
    tools: list[str]
    grader: str
    editable: list[str]
    tags: list[str]
    state: TaskState
    reasons: list[dict[str, Any]] = Field(description="The admission checks: name, ok, detail.")


class EvaluationRequest(ApiModel):
    """Samples tasks of a suite with the weights served now, and grades them."""

    suite: Text = Field(description="Id, name, or name@version.", examples=["first-bugs"])
    split: Split = Split.HELDOUT
    num_tasks: int = Field(ge=1, le=20_000, examples=[100])
    samples_per_task: int = Field(default=1, ge=1, le=256)
    temperature: float = Field(default=1.0, ge=0, le=10)
    max_turns: int = Field(default=6, ge=1, le=1000)
    max_tokens: int = Field(default=512, ge=1, le=1 << 24)
    max_new_tokens: int = Field(default=96, ge=1, le=1 << 20)
    seed: int = Field(default=0, ge=0, le=(1 << 62), description="The same seed draws the same tasks.")

    @field_validator("temperature")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value


class EvaluationCreated(ApiModel):
    """Where to ask for the result."""

    evaluation_id: str


class EvaluationView(ApiModel):
    """An evaluation and its sums so far."""

    evaluation_id: str
    state: str = Field(description="running or completed.")
    suite_id: str
    request: dict[str, Any]
    num_episodes: int
    num_done: int
    num_passed: int
    infra_failed: int = Field(description="Episodes the platform failed; they are in no rate.")
    success_rate: float | None = Field(description="Passed over graded; null where none is graded.")
    wilson_low: float | None
    wilson_high: float | None
    mean_turns: float | None
    tokens_generated: int
    weight_version: int | None = Field(description="Served when it began.")
    engine_utilisation: float | None = Field(description="Share of slot time spent generating meanwhile.")
    seconds: float
    created_at: datetime


class ScriptedCall(ApiModel):
    """A tool call of a script."""

    name: Text = Field(min_length=1, max_length=200, examples=["read_file"])
    arguments: dict[str, JsonValue] = Field(examples=[{"path": "calc.py"}])


class ScriptedTurnModel(ApiModel):
    """One turn of a script."""

    text: Text = ""
    tool_calls: list[ScriptedCall] = Field(default=[])

    def as_turn(self) -> ScriptedTurn:
        """The turn as a value."""
        calls = tuple((call.name, dict[str, object](call.arguments)) for call in self.tool_calls)
        return ScriptedTurn(text=self.text, tool_calls=calls)


class DemonstrationModel(ApiModel):
    """One scripted episode."""

    task: Text = Field(description="Id or name of an admitted task.")
    turns: list[ScriptedTurnModel] = Field(min_length=1, max_length=1000)


class DemonstrationsRequest(ApiModel):
    """Scripted episodes for a run that learns from them."""

    run_id: Text = Field(min_length=1, max_length=64)
    suite: Text | None = Field(
        default=None, description="Where names are looked up; needed if they are ambiguous."
    )
    demonstrations: list[DemonstrationModel] = Field(min_length=1, max_length=50_000)


class DemonstrationsCreated(ApiModel):
    """Where to ask for the progress."""

    demonstration_id: str
    num_episodes: int


class DemonstrationsView(ApiModel):
    """How far a set of demonstrations is."""

    demonstration_id: str
    run_id: str
    state: str = Field(description="running or completed.")
    num_episodes: int
    num_done: int = Field(description="Sent to the trainer.")
    num_failed: int = Field(description="The platform failed, or the task was not admitted.")
    created_at: datetime


class EngineView(ApiModel):
    """One engine."""

    engine_id: str
    url: str
    healthy: bool = Field(description="Whether it gets requests.")
    weight_version: int = Field(description="-1 where it was not reached yet.")
    slots: int
    num_in_flight: int
    busy_slot_seconds: float
    seconds: float
    utilisation: float = Field(description="busy_slot_seconds / (slots · seconds).")
    tokens_generated: int
    paused_seconds: float


class EnginesView(ApiModel):
    """Every engine and what is served."""

    run_id: str = Field(description="Whose weights; empty for the model the engines started with.")
    weight_version: int
    items: list[EngineView]


class ReasonSpan(ApiModel):
    """Tokens [start, end) that share a mask reason."""

    start: int
    end: int
    reason: str


class WeightSpan(ApiModel):
    """Sampled tokens [start, end) of one weight version."""

    start: int
    end: int
    weight_version: int
    engine_id: str


class RowView(ApiModel):
    """One training sequence, token by token."""

    token_ids: list[int]
    logprobs: list[float] = Field(description="Under the sampling distribution; 0 where not sampled.")
    reasons: list[ReasonSpan]
    weight_versions: list[WeightSpan]


class EpisodeView(ApiModel):
    """An episode without its tokens."""

    episode_id: str
    task_id: str
    run_id: str
    group_id: str
    group_index: int
    evaluation_id: str | None
    demonstration_id: str | None
    attempt: int
    state: str
    outcome: str | None
    reward: float | None = Field(description="null: not graded, which is never 0.")
    error: str
    num_turns: int
    num_sampled_tokens: int
    created_at: datetime
    updated_at: datetime


class EpisodeDetail(EpisodeView):
    """An episode with its turns and rows, from the attempt that ended it."""

    turns: list[dict[str, Any]] = Field(description="For people; never training data.")
    rows: list[RowView]
    grade: dict[str, Any] | None
    sampling: dict[str, Any] | None


def _check_size(files: dict[str, str]) -> None:
    if len(files) > MAX_FILES:
        raise ValueError(f"more than {MAX_FILES} files")
    if sum(len(text.encode()) for text in files.values()) > MAX_WORKSPACE_BYTES:
        raise ValueError(f"more than {MAX_WORKSPACE_BYTES} bytes")


def _as_files(files: dict[str, str]) -> tuple[File, ...]:
    return tuple(File(path=path, content=text.encode()) for path, text in files.items())
