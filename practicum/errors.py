"""The error tree of Practicum.

Every error that crosses a room derives from `PracticumError` and carries a `code`: the word that
travels over REST and gRPC instead of a class name. A bad input from a caller is a `ValueError`
inside and `InvalidInput` at an edge; an episode that fails is data (an `Outcome`), not an error.
"""

from typing import overload


class PracticumError(Exception):
    """Base of every error raised on purpose."""

    code = "internal"


class InvalidInput(PracticumError):
    """A caller's input is wrong; `field` names the part and the message says how to mend it."""

    code = "invalid_input"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(PracticumError):
    """What was asked for does not exist."""

    code = "not_found"


class Conflict(PracticumError):
    """The request contradicts the present state."""

    code = "conflict"


class Unauthorized(PracticumError):
    """The caller showed no valid token."""

    code = "unauthorized"


class Forbidden(PracticumError):
    """The caller's token is valid and lacks the scope that this needs; the message names it."""

    code = "forbidden"


class Overloaded(PracticumError):
    """No room now; `retry_after_s` says when to come back."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueError(PracticumError):
    """The queue refused or lost its connection."""

    code = "queue"


class QueueFull(QueueError):
    """The queue is at its bound; the item stays with the caller."""

    code = "queue_full"


class EngineError(PracticumError):
    """An engine answered wrongly or not at all."""

    code = "engine"


class SandboxError(PracticumError):
    """The platform could not make or keep a sandbox; never the policy's doing."""

    code = "sandbox"


class GraderError(PracticumError):
    """The platform could not grade; gives no grade, never reward 0."""

    code = "grader"


class IntakeError(PracticumError):
    """A trajectory breaks an invariant and is quarantined; `reason` is the counted word."""

    code = "intake"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CheckpointError(PracticumError):
    """A checkpoint is incomplete, changed or cannot be written."""

    code = "checkpoint"


@overload
def first_error(error: Exception) -> Exception: ...
@overload
def first_error(error: BaseException) -> BaseException: ...
def first_error(error: BaseException) -> BaseException:
    """The first error of a group, which is the one that ended it; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
