"""The reward service's part of a task, made from values and kept as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from practicum.trajectory import Trajectory
from practicum.v1 import reward_pb2 as pb
from practicum.wire import trajectory_to_pb
from services.rollout.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a workspace."""

    path: str
    content: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a sandbox may use; 0 means the reward service's default."""

    session_wall_s: float = 0.0
    call_wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    num_processes: int = 0
    file_size_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How a task is graded; never enters the episode's sandbox."""

    kind: str
    files: tuple[File, ...] = ()
    editable: tuple[str, ...] = ()
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The changes of a solution that passes."""

    files: tuple[File, ...] = ()
    removed: tuple[str, ...] = ()


def task_spec_bytes(
    *, task_id: str, files: Sequence[File], tools: Sequence[str], grading: Grading, limits: Limits
) -> bytes:
    """A serialised `TaskSpec`."""
    return pb.TaskSpec(
        task_id=task_id,
        workspace=pb.Workspace(files=[_file(file) for file in files]),
        tools=tools,
        grader=pb.Grader(
            kind=grading.kind,
            files=[_file(file) for file in grading.files],
            editable=grading.editable,
            timeout_s=grading.timeout_s,
        ),
        limits=pb.SandboxLimits(
            session_wall_s=limits.session_wall_s,
            call_wall_s=limits.call_wall_s,
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            num_processes=limits.num_processes,
            file_size_bytes=limits.file_size_bytes,
            output_bytes=limits.output_bytes,
        ),
    ).SerializeToString()


def reference_bytes(reference: Reference) -> bytes:
    """A serialised `WorkspaceDiff` of a solution."""
    return pb.WorkspaceDiff(
        changed=[_file(file) for file in reference.files], removed=reference.removed
    ).SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """What a person may see of a stored spec: no hidden test."""

    files: tuple[str, ...]
    grader: str
    editable: tuple[str, ...]


def task_summary(spec: bytes) -> TaskSummary:
    """The summary of a serialised `TaskSpec`."""
    message = pb.TaskSpec.FromString(spec)
    return TaskSummary(
        files=tuple(file.path for file in message.workspace.files),
        grader=message.grader.kind,
        editable=tuple(message.grader.editable),
    )


def grade_request(trajectory: Trajectory, task: Task, diff: bytes) -> pb.GradeRequest:
    """What the grading stream carries for one finished attempt."""
    return pb.GradeRequest(
        trajectory=trajectory_to_pb(trajectory),
        task=pb.TaskSpec.FromString(task.spec),
        diff=pb.WorkspaceDiff.FromString(diff),
    )


def _file(file: File) -> pb.WorkspaceFile:
    return pb.WorkspaceFile(path=file.path, content=file.content, executable=file.executable)
