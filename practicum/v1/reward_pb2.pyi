from practicum.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkspaceFile(_message.Message):
    __slots__ = ("path", "content", "executable")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    path: str
    content: bytes
    executable: bool
    def __init__(self, path: _Optional[str] = ..., content: _Optional[bytes] = ..., executable: _Optional[bool] = ...) -> None: ...

class Workspace(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[WorkspaceFile]
    def __init__(self, files: _Optional[_Iterable[_Union[WorkspaceFile, _Mapping]]] = ...) -> None: ...

class SandboxLimits(_message.Message):
    __slots__ = ("session_wall_s", "call_wall_s", "cpu_s", "memory_bytes", "num_processes", "file_size_bytes", "output_bytes")
    SESSION_WALL_S_FIELD_NUMBER: _ClassVar[int]
    CALL_WALL_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_wall_s: float
    call_wall_s: float
    cpu_s: float
    memory_bytes: int
    num_processes: int
    file_size_bytes: int
    output_bytes: int
    def __init__(self, session_wall_s: _Optional[float] = ..., call_wall_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., num_processes: _Optional[int] = ..., file_size_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ...) -> None: ...

class Grader(_message.Message):
    __slots__ = ("kind", "files", "editable", "timeout_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    EDITABLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    files: _containers.RepeatedCompositeFieldContainer[WorkspaceFile]
    editable: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, kind: _Optional[str] = ..., files: _Optional[_Iterable[_Union[WorkspaceFile, _Mapping]]] = ..., editable: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TaskSpec(_message.Message):
    __slots__ = ("task_id", "workspace", "tools", "grader", "limits")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    workspace: Workspace
    tools: _containers.RepeatedScalarFieldContainer[str]
    grader: Grader
    limits: SandboxLimits
    def __init__(self, task_id: _Optional[str] = ..., workspace: _Optional[_Union[Workspace, _Mapping]] = ..., tools: _Optional[_Iterable[str]] = ..., grader: _Optional[_Union[Grader, _Mapping]] = ..., limits: _Optional[_Union[SandboxLimits, _Mapping]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("session_id", "task_id", "workspace", "tools", "limits")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    task_id: str
    workspace: Workspace
    tools: _containers.RepeatedScalarFieldContainer[str]
    limits: SandboxLimits
    def __init__(self, session_id: _Optional[str] = ..., task_id: _Optional[str] = ..., workspace: _Optional[_Union[Workspace, _Mapping]] = ..., tools: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[SandboxLimits, _Mapping]] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("session_id", "backend", "address")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    backend: str
    address: str
    def __init__(self, session_id: _Optional[str] = ..., backend: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class CallToolRequest(_message.Message):
    __slots__ = ("session_id", "call_id", "name", "arguments_json")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    call_id: str
    name: str
    arguments_json: str
    def __init__(self, session_id: _Optional[str] = ..., call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class CallToolResponse(_message.Message):
    __slots__ = ("output", "is_error", "ends_episode", "limit_hit", "seconds")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    ENDS_EPISODE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_HIT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    output: str
    is_error: bool
    ends_episode: bool
    limit_hit: str
    seconds: float
    def __init__(self, output: _Optional[str] = ..., is_error: _Optional[bool] = ..., ends_episode: _Optional[bool] = ..., limit_hit: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class WorkspaceDiff(_message.Message):
    __slots__ = ("changed", "removed", "refused")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedCompositeFieldContainer[WorkspaceFile]
    removed: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed: _Optional[_Iterable[_Union[WorkspaceFile, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GradeRequest(_message.Message):
    __slots__ = ("trajectory", "task", "diff")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    trajectory: _trajectory_pb2.Trajectory
    task: TaskSpec
    diff: WorkspaceDiff
    def __init__(self, trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., task: _Optional[_Union[TaskSpec, _Mapping]] = ..., diff: _Optional[_Union[WorkspaceDiff, _Mapping]] = ...) -> None: ...

class GradeResponse(_message.Message):
    __slots__ = ("grade", "outcome")
    GRADE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    grade: _trajectory_pb2.Grade
    outcome: _trajectory_pb2.Outcome
    def __init__(self, grade: _Optional[_Union[_trajectory_pb2.Grade, _Mapping]] = ..., outcome: _Optional[_Union[_trajectory_pb2.Outcome, str]] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("task", "reference")
    TASK_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    task: TaskSpec
    reference: WorkspaceDiff
    def __init__(self, task: _Optional[_Union[TaskSpec, _Mapping]] = ..., reference: _Optional[_Union[WorkspaceDiff, _Mapping]] = ...) -> None: ...

class AdmissionCheck(_message.Message):
    __slots__ = ("name", "ok", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ok: bool
    detail: str
    def __init__(self, name: _Optional[str] = ..., ok: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("admitted", "checks")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    checks: _containers.RepeatedCompositeFieldContainer[AdmissionCheck]
    def __init__(self, admitted: _Optional[bool] = ..., checks: _Optional[_Iterable[_Union[AdmissionCheck, _Mapping]]] = ...) -> None: ...

class ListToolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToolSpec(_message.Message):
    __slots__ = ("name", "description", "parameters_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ...) -> None: ...

class ListToolsResponse(_message.Message):
    __slots__ = ("tools",)
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[ToolSpec]
    def __init__(self, tools: _Optional[_Iterable[_Union[ToolSpec, _Mapping]]] = ...) -> None: ...
