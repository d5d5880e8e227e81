"""One generation request and what it leaves behind.

Owns: the tokens of a request, its logprobs, its weight-version spans and the rule that ends it. Never touches
tensors.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from engines.cpu.prefix_cache import Ids, block_chain
from engines.cpu.sampling import SamplingParams


class FinishKind(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class AbortMessage(StrEnum):
    """The words of an abort, as SGLang says them; the last two are this engine's own."""

    RUNNING = "Aborted"
    WAITING = "Abort in waiting queue"
    NOT_FINITE = "The logits are not finite numbers"
    SHUTDOWN = "The engine is shutting down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """`matched` is the stop id or string of a STOP; `message` the words of an ABORT."""

    kind: FinishKind
    matched: int | str | None = None
    message: AbortMessage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Output tokens start..end-1 were sampled from `version`."""

    version: str
    start: int
    end: int


class Request:
    """A request in flight. The batcher's thread is the only one that changes it.

    Invariant: `output_ids` and `output_logprobs` have one length and only grow, also across a retraction.
    """

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "chain",
        "finish",
        "finished_version",
        "forbidden_ids",
        "future",
        "has_stale_kv",
        "logprob_start",
        "max_new_tokens",
        "num_retractions",
        "output_ids",
        "output_logprobs",
        "params",
        "prefilled",
        "prompt_ids",
        "prompt_logprobs",
        "rid",
        "slot",
        "stop_ids",
        "version_starts",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        eos_ids: frozenset[int],
        max_new_tokens: int,
        logprob_start: int | None,
    ) -> None:
        self.rid = rid
        self.prompt_ids: Ids = np.asarray(prompt_ids, dtype=np.int32)
        self.chain = block_chain(self.prompt_ids)
        self.params = params
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset() if params.ignore_eos else eos_ids | params.stop_token_ids
        # min_new_tokens takes the ids out of the distribution even where ignore_eos would let them pass
        self.forbidden_ids = sorted(eos_ids | params.stop_token_ids) if params.min_new_tokens else []
        self.logprob_start = logprob_start  # None = no prompt logprobs asked for
        self.prompt_logprobs: list[float] = []
        self.output_ids: list[int] = []
        self.output_logprobs: list[float] = []
        self.version_starts: list[tuple[str, int]] = []
        self.finished_version = ""
        self.finish: Finish | None = None
        self.slot = -1  # -1 = in no slot
        self.prefilled = 0  # tokens whose keys and values are in the slot, before the first decode
        self.cached_tokens: int | None = None  # None = never admitted
        self.num_retractions = 0
        self.has_stale_kv = False  # the slot holds keys and values of earlier weights
        self.arrived_s = time.monotonic()
        self.future: Future[Request] = Future()

    @property
    def cached_ids(self) -> Ids:
        """What another request may copy once this one decodes.

        The first decode may still owe the last token.
        """
        return self.prompt_ids[:-1]

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_tokens(self) -> int:
        """Prompt and all the output that may come."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def last_id(self) -> int:
        """The newest token: the input of the next decode."""
        return self.output_ids[-1] if self.output_ids else int(self.prompt_ids[-1])

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while prompt logprobs are owed."""
        if self.logprob_start is None:
            return False
        return len(self.prompt_logprobs) < len(self.prompt_ids) - 1 - self.logprob_start

    def sequence(self) -> Ids:
        """Prompt and output ids."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, dtype=np.int32)))

    def enter_version(self, version: str) -> None:
        """Tokens from here on come from `version`."""
        if self.version_starts and self.version_starts[-1][1] == len(self.output_ids):
            self.version_starts.pop()
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.output_ids)))

    def version_spans(self) -> list[VersionSpan]:
        """Half-open spans that cover the output; one empty span where there is none."""
        starts = self.version_starts or [(self.finished_version, 0)]
        ends = [start for _, start in starts[1:]] + [len(self.output_ids)]
        spans = [
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(starts, ends, strict=True)
        ]
        return [span for span in spans if span.end > span.start] or spans[-1:]
