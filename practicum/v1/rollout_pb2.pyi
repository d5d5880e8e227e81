from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Probe(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("run_id", "weight_version", "path", "manifest_sha256", "probes", "tolerance", "rollback")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    weight_version: int
    path: str
    manifest_sha256: str
    probes: _containers.RepeatedCompositeFieldContainer[Probe]
    tolerance: float
    rollback: bool
    def __init__(self, run_id: _Optional[str] = ..., weight_version: _Optional[int] = ..., path: _Optional[str] = ..., manifest_sha256: _Optional[str] = ..., probes: _Optional[_Iterable[_Union[Probe, _Mapping]]] = ..., tolerance: _Optional[float] = ..., rollback: _Optional[bool] = ...) -> None: ...

class EnginePublishResult(_message.Message):
    __slots__ = ("engine_id", "ok", "weight_version", "max_logprob_diff", "paused_s", "error")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_DIFF_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    ok: bool
    weight_version: int
    max_logprob_diff: float
    paused_s: float
    error: str
    def __init__(self, engine_id: _Optional[str] = ..., ok: _Optional[bool] = ..., weight_version: _Optional[int] = ..., max_logprob_diff: _Optional[float] = ..., paused_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("ok", "engines", "weight_version")
    OK_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    engines: _containers.RepeatedCompositeFieldContainer[EnginePublishResult]
    weight_version: int
    def __init__(self, ok: _Optional[bool] = ..., engines: _Optional[_Iterable[_Union[EnginePublishResult, _Mapping]]] = ..., weight_version: _Optional[int] = ...) -> None: ...

class GetVersionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionsResponse(_message.Message):
    __slots__ = ("weight_version", "run_id", "engines")
    class EnginesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    weight_version: int
    run_id: str
    engines: _containers.ScalarMap[str, int]
    def __init__(self, weight_version: _Optional[int] = ..., run_id: _Optional[str] = ..., engines: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("num_episodes",)
    NUM_EPISODES_FIELD_NUMBER: _ClassVar[int]
    num_episodes: int
    def __init__(self, num_episodes: _Optional[int] = ...) -> None: ...

class GetSuiteRequest(_message.Message):
    __slots__ = ("suite",)
    SUITE_FIELD_NUMBER: _ClassVar[int]
    suite: str
    def __init__(self, suite: _Optional[str] = ...) -> None: ...

class GetSuiteResponse(_message.Message):
    __slots__ = ("suite_id", "num_train_admitted", "num_train_admitting")
    SUITE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAIN_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAIN_ADMITTING_FIELD_NUMBER: _ClassVar[int]
    suite_id: str
    num_train_admitted: int
    num_train_admitting: int
    def __init__(self, suite_id: _Optional[str] = ..., num_train_admitted: _Optional[int] = ..., num_train_admitting: _Optional[int] = ...) -> None: ...
