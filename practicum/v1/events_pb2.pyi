import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from practicum.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("event_id", "type", "created_at", "attempt", "traceparent", "payload", "encoding")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    type: str
    created_at: _timestamp_pb2.Timestamp
    attempt: int
    traceparent: str
    payload: bytes
    encoding: str
    def __init__(self, event_id: _Optional[str] = ..., type: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., traceparent: _Optional[str] = ..., payload: _Optional[bytes] = ..., encoding: _Optional[str] = ...) -> None: ...

class TrajectoryGraded(_message.Message):
    __slots__ = ("trajectory_id", "episode_id", "attempt", "outcome", "grade")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GRADE_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    episode_id: str
    attempt: int
    outcome: _trajectory_pb2.Outcome
    grade: _trajectory_pb2.Grade
    def __init__(self, trajectory_id: _Optional[str] = ..., episode_id: _Optional[str] = ..., attempt: _Optional[int] = ..., outcome: _Optional[_Union[_trajectory_pb2.Outcome, str]] = ..., grade: _Optional[_Union[_trajectory_pb2.Grade, _Mapping]] = ...) -> None: ...

class RunChanged(_message.Message):
    __slots__ = ("run_id", "state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class StepCommitted(_message.Message):
    __slots__ = ("run_id", "step", "weight_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    weight_version: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class VersionPublished(_message.Message):
    __slots__ = ("run_id", "weight_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    weight_version: int
    def __init__(self, run_id: _Optional[str] = ..., weight_version: _Optional[int] = ...) -> None: ...
