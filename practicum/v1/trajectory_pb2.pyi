import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASK_REASON_UNSPECIFIED: _ClassVar[MaskReason]
    MASK_REASON_PROMPT: _ClassVar[MaskReason]
    MASK_REASON_TOOL: _ClassVar[MaskReason]
    MASK_REASON_MODEL: _ClassVar[MaskReason]
    MASK_REASON_EXPIRED: _ClassVar[MaskReason]
    MASK_REASON_INJECTED: _ClassVar[MaskReason]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMPLETED: _ClassVar[Outcome]
    OUTCOME_TRUNCATED: _ClassVar[Outcome]
    OUTCOME_TIMED_OUT: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_INFRA_FAILED: _ClassVar[Outcome]
    OUTCOME_TAMPERED: _ClassVar[Outcome]
MASK_REASON_UNSPECIFIED: MaskReason
MASK_REASON_PROMPT: MaskReason
MASK_REASON_TOOL: MaskReason
MASK_REASON_MODEL: MaskReason
MASK_REASON_EXPIRED: MaskReason
MASK_REASON_INJECTED: MaskReason
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMPLETED: Outcome
OUTCOME_TRUNCATED: Outcome
OUTCOME_TIMED_OUT: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_INFRA_FAILED: Outcome
OUTCOME_TAMPERED: Outcome

class MaskSpan(_message.Message):
    __slots__ = ("start", "end", "reason")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    reason: MaskReason
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., reason: _Optional[_Union[MaskReason, str]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "end", "weight_version", "engine_id")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    weight_version: int
    engine_id: str
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., weight_version: _Optional[int] = ..., engine_id: _Optional[str] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("token_ids", "logprobs", "mask_spans", "version_spans")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MASK_SPANS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    mask_spans: _containers.RepeatedCompositeFieldContainer[MaskSpan]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., mask_spans: _Optional[_Iterable[_Union[MaskSpan, _Mapping]]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments_json", "result", "is_error", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    IS_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    result: str
    is_error: bool
    seconds: float
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., result: _Optional[str] = ..., is_error: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("index", "text", "tool_calls", "engine_request_id", "finish_reason", "num_prompt_tokens", "num_sampled_tokens", "generation_s", "tools_s", "waiting_s")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_S_FIELD_NUMBER: _ClassVar[int]
    TOOLS_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    engine_request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    generation_s: float
    tools_s: float
    waiting_s: float
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., engine_request_id: _Optional[str] = ..., finish_reason: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., generation_s: _Optional[float] = ..., tools_s: _Optional[float] = ..., waiting_s: _Optional[float] = ...) -> None: ...

class GradeComponent(_message.Message):
    __slots__ = ("name", "value", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    weight: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class TestResult(_message.Message):
    __slots__ = ("test_id", "status", "message", "seconds")
    TEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    test_id: str
    status: str
    message: str
    seconds: float
    def __init__(self, test_id: _Optional[str] = ..., status: _Optional[str] = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Grade(_message.Message):
    __slots__ = ("reward", "components", "tests", "evidence", "grader", "grader_version", "sandbox_backend", "seconds")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    TESTS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    GRADER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_BACKEND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    components: _containers.RepeatedCompositeFieldContainer[GradeComponent]
    tests: _containers.RepeatedCompositeFieldContainer[TestResult]
    evidence: _containers.RepeatedScalarFieldContainer[str]
    grader: str
    grader_version: str
    sandbox_backend: str
    seconds: float
    def __init__(self, reward: _Optional[float] = ..., components: _Optional[_Iterable[_Union[GradeComponent, _Mapping]]] = ..., tests: _Optional[_Iterable[_Union[TestResult, _Mapping]]] = ..., evidence: _Optional[_Iterable[str]] = ..., grader: _Optional[str] = ..., grader_version: _Optional[str] = ..., sandbox_backend: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("trajectory_id", "run_id", "task_id", "group_id", "group_index", "group_size", "episode_id", "attempt", "rows", "turns", "outcome", "grade", "error", "template_fingerprint", "tokenizer_fingerprint", "sampling", "created_at", "finished_at", "checksum")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GRADE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    run_id: str
    task_id: str
    group_id: str
    group_index: int
    group_size: int
    episode_id: str
    attempt: int
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    outcome: Outcome
    grade: Grade
    error: str
    template_fingerprint: str
    tokenizer_fingerprint: str
    sampling: SamplingParams
    created_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    checksum: str
    def __init__(self, trajectory_id: _Optional[str] = ..., run_id: _Optional[str] = ..., task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., group_index: _Optional[int] = ..., group_size: _Optional[int] = ..., episode_id: _Optional[str] = ..., attempt: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., grade: _Optional[_Union[Grade, _Mapping]] = ..., error: _Optional[str] = ..., template_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., checksum: _Optional[str] = ...) -> None: ...
