"""practicum.v1 reward messages <-> the dataclasses of this service. The only converters."""

from practicum.errors import InvalidInput
from practicum.v1 import reward_pb2 as pb
from services.reward.graders.base import GraderSpec, Task
from services.reward.integrity.paths import check_files
from services.reward.sandbox.base import Changes, File
from services.reward.sandbox.limits import SandboxLimits, limits_from

MAX_GRADER_TIMEOUT_S = 900.0
DEFAULT_GRADER_TIMEOUT_S = 30.0


def files_from_pb(workspace: pb.Workspace, field: str) -> tuple[File, ...]:
    """A workspace's files. Raises `InvalidInput` that names the one that may not be laid out."""
    files = tuple(_file(message) for message in workspace.files)
    check_files(field, files)
    return files


def task_from_pb(message: pb.TaskSpec, defaults: SandboxLimits) -> Task:
    """A task, its files unchecked (admission and grading check them). Raises `InvalidInput`."""
    timeout_s = message.grader.timeout_s or DEFAULT_GRADER_TIMEOUT_S
    if not 0 < timeout_s <= MAX_GRADER_TIMEOUT_S:
        raise InvalidInput(
            "grader.timeout_s", f"{timeout_s} is not above 0 and at most {MAX_GRADER_TIMEOUT_S}"
        )
    return Task(
        task_id=message.task_id,
        workspace=tuple(_file(file) for file in message.workspace.files),
        tools=tuple(message.tools),
        grader=GraderSpec(
            kind=message.grader.kind,
            files=tuple(_file(file) for file in message.grader.files),
            editable=tuple(message.grader.editable),
            timeout_s=timeout_s,
        ),
        limits=limits_from(message.limits, defaults),
    )


def changes_from_pb(message: pb.WorkspaceDiff) -> Changes:
    """The policy's changes; the path policy judges them later."""
    return Changes(
        changed=tuple(_file(file) for file in message.changed),
        removed=tuple(message.removed),
        refused=tuple(message.refused),
    )


def changes_to_pb(changes: Changes) -> pb.WorkspaceDiff:
    """The policy's changes as their message."""
    return pb.WorkspaceDiff(
        changed=[
            pb.WorkspaceFile(path=file.path, content=file.content, executable=file.executable)
            for file in changes.changed
        ],
        removed=changes.removed,
        refused=changes.refused,
    )


def _file(message: pb.WorkspaceFile) -> File:
    return File(path=message.path, content=message.content, executable=message.executable)
