"""What an engine call gives back, and the names of weights on an engine.

An engine names its weights by a text label. Labels that this service sets are the version in decimal and
the number of the load, "7.31": no label is used twice, so tokens made by weights that were refused can never
be mistaken for tokens made by good ones. An engine that nobody updated calls its weights "default", which is
the base model, version 0.
"""

from dataclasses import dataclass
from enum import StrEnum

from practicum.errors import EngineError
from practicum.trajectory import Floats, Ids, VersionSpan

BASE_LABEL = "default"


class FinishReason(StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Sampled tokens of one turn: T ids with their T logprobs under the sampling distribution."""

    request_id: str
    token_ids_T: Ids
    logprobs_T: Floats
    version_spans: tuple[VersionSpan, ...]  # positions count from the first sampled token
    finish_reason: FinishReason
    labels: tuple[str, ...] = ()  # the engine's own names of the weights that sampled, in order
    generation_s: float = 0.0
    waiting_s: float = 0.0  # before the engine had a slot


def version_of(label: str) -> int:
    """The weight version behind an engine's label; `EngineError` where it is none of ours."""
    if label == BASE_LABEL:
        return 0
    number = label.partition(".")[0]
    if not number.isdecimal():
        raise EngineError(f"the engine names its weights {label!r}, which is no weight version")
    return int(number)
