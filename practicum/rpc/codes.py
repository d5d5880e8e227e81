"""How errors cross gRPC: a status for machines in between, a code word for the caller.

A remote error travels as its `code`, never as a class name; an unknown code arrives as
`PracticumError`.
"""

import grpc

from practicum import errors

TOKEN_KEY = "authorization"
CODE_KEY = "practicum-code"
FIELD_KEY = "practicum-field"
RETRY_AFTER_KEY = "practicum-retry-after"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MESSAGE_LIMITS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

_STATUS_BY_CODE = {
    errors.InvalidInput.code: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound.code: grpc.StatusCode.NOT_FOUND,
    errors.Conflict.code: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthorized.code: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden.code: grpc.StatusCode.PERMISSION_DENIED,
    errors.Overloaded.code: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_PLAIN_ERRORS: dict[str, type[errors.PracticumError]] = {
    kind.code: kind
    for kind in (
        errors.NotFound,
        errors.Conflict,
        errors.Unauthorized,
        errors.Forbidden,
        errors.QueueError,
        errors.QueueFull,
        errors.EngineError,
        errors.SandboxError,
        errors.GraderError,
        errors.CheckpointError,
    )
}


class RpcUnavailable(errors.PracticumError):
    """The other service cannot be reached or did not answer in time."""

    code = "unavailable"


def status_of(error: errors.PracticumError) -> grpc.StatusCode:
    """The gRPC status that fits an error."""
    return _STATUS_BY_CODE.get(error.code, grpc.StatusCode.INTERNAL)


def trailing_metadata(error: errors.PracticumError) -> tuple[tuple[str, str], ...]:
    """What travels beside the status."""
    pairs = [(CODE_KEY, error.code)]
    if isinstance(error, errors.InvalidInput):
        pairs.append((FIELD_KEY, error.field))
    if isinstance(error, errors.Overloaded):
        pairs.append((RETRY_AFTER_KEY, str(error.retry_after_s)))
    return tuple(pairs)


def error_from(call: grpc.aio.AioRpcError) -> errors.PracticumError:
    """The error behind a failed call."""
    metadata = {key: value for key, value in (call.trailing_metadata() or ()) if isinstance(value, str)}
    detail = call.details() or call.code().name.lower()
    code = metadata.get(CODE_KEY)
    if code == errors.InvalidInput.code:
        field = metadata.get(FIELD_KEY, "request")
        return errors.InvalidInput(field, detail.removeprefix(f"{field}: "))
    if code == errors.Overloaded.code or call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.Overloaded(detail, float(metadata.get(RETRY_AFTER_KEY, "1")))
    if code in _PLAIN_ERRORS:
        return _PLAIN_ERRORS[code](detail)
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return RpcUnavailable(f"{call.code().name.lower()}: {detail}")
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return errors.Unauthorized(detail)
    if call.code() is grpc.StatusCode.PERMISSION_DENIED:
        return errors.Forbidden(detail)
    return errors.PracticumError(detail)
