"""`Ledger`: the rows of one episode, from the first prompt to the trajectory.

Owns the order and the origin of every token. Never decodes, never encodes, never talks to an engine.
What an engine answers is checked before any of it is appended, so that a broken answer leaves the
ledger as it was. The invariants stand in the package's docstring.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from practicum.errors import EngineError
from practicum.trajectory import Floats, Ids, MaskReason, Row, VersionSpan
from services.rollout.ledger.open_row import OpenRow

# Engines round: a certain token may come back as a tiny positive number. `Row.check` has the same bound.
_LOGPROB_CEILING = 1e-3

_CONTEXT_REASONS = frozenset({MaskReason.PROMPT, MaskReason.TOOL, MaskReason.INJECTED})


class Ledger:
    """One episode's rows. Lives as long as the episode; not shared between tasks."""

    def __init__(self, *, vocab_size: int) -> None:
        """`vocab_size`: ids must be below it, since an engine may die of an id it has no embedding for."""
        self._vocab_size = vocab_size
        self._rows: list[OpenRow] = []
        self._prefix_breaks: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the current row: the length of the next prompt."""
        return len(self._current)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled in the episode, over all rows; tool tokens are not among them."""
        return sum(row.num_sampled for row in self._rows)

    @property
    def last_id(self) -> int:
        """The last id of the current row."""
        return int(self._current.ids()[-1])

    @property
    def prefix_breaks(self) -> tuple[int, ...]:
        """Positions at which a new prompt left its row, one per break; for logs and metrics."""
        return tuple(self._prefix_breaks)

    def open(self, prompt_ids: ArrayLike) -> None:
        """Begin the first row with a prompt of at least one token.

        `ValueError` for an empty prompt and for ids out of the vocabulary.
        """
        assert not self._rows, "a ledger is opened once"
        self._rows.append(self._prompt_row(self._context_ids(prompt_ids)))

    def append_sampled(
        self, ids: ArrayLike, logprobs: ArrayLike, version_spans: Sequence[VersionSpan]
    ) -> None:
        """Append what an engine sampled, also a part it gave back early; all may be empty.

        `version_spans` are half-open ranges of `ids`, counted from 0, that cover every one. `EngineError`
        where lengths, ids, logprobs or spans do not fit; nothing is appended then.
        """
        sampled_ids, sampled_logprobs = self._checked_sample(ids, logprobs)
        _check_cover(version_spans, len(sampled_ids))
        self._current.append_sampled(sampled_ids, sampled_logprobs, version_spans)

    def append_context(self, ids: ArrayLike, reason: MaskReason) -> None:
        """Append tokens the policy did not sample: PROMPT, TOOL or INJECTED. `ValueError` otherwise."""
        if reason not in _CONTEXT_REASONS:
            raise ValueError(f"{reason} is no reason for context")
        self._current.append_context(self._context_ids(ids), reason)

    def replace_prompt(self, prompt_ids: ArrayLike) -> int | None:
        """Make `prompt_ids` the next prompt. None = it extends the row, which goes on.

        Otherwise a new row begins with all of it as PROMPT, and the position of the first difference is
        returned: one row must not mix two contexts. The row before keeps what was sampled in it.
        """
        prompt = self._context_ids(prompt_ids)
        row_ids = self._current.ids()
        num_shared = _common_prefix(row_ids, prompt)
        if num_shared == len(row_ids):
            self._current.append_context(prompt[num_shared:], MaskReason.PROMPT)
            return None
        self._rows.append(self._prompt_row(prompt))
        self._prefix_breaks.append(num_shared)
        return num_shared

    def prompt_ids(self) -> Ids:
        """The next engine prompt: a read-only view of the current row, no copy."""
        return self._current.ids()

    def rows(self) -> tuple[Row, ...]:
        """The training rows, each checked; rows without a sampled token only where there is no other.

        Arrays are copies: the episode may go on. `IntakeError` where an invariant does not hold.
        """
        sampled = [row for row in self._rows if row.num_sampled] or self._rows[-1:]
        rows = tuple(row.to_row() for row in sampled)
        for row in rows:
            row.check()
        return rows

    @property
    def _current(self) -> OpenRow:
        assert self._rows, "the ledger has not been opened"
        return self._rows[-1]

    def _prompt_row(self, prompt: Ids) -> OpenRow:
        if not len(prompt):
            raise ValueError("a prompt has at least one token")
        row = OpenRow()
        row.append_context(prompt, MaskReason.PROMPT)
        return row

    def _context_ids(self, ids: ArrayLike) -> Ids:
        context = _as_ids(ids)
        if not self._in_vocabulary(context):
            raise ValueError(f"a token id lies outside the model's vocabulary of {self._vocab_size}")
        return context

    def _checked_sample(self, ids: ArrayLike, logprobs: ArrayLike) -> tuple[Ids, Floats]:
        try:
            sampled_ids, sampled_logprobs = _as_ids(ids), np.asarray(logprobs, dtype=np.float32)
        except (ValueError, TypeError, OverflowError) as error:
            raise EngineError(f"sampled tokens are no numbers: {error}") from error
        if sampled_logprobs.shape != sampled_ids.shape:
            raise EngineError(f"{len(sampled_ids)} sampled ids but {sampled_logprobs.size} logprobs")
        if not self._in_vocabulary(sampled_ids):
            raise EngineError(f"a sampled id lies outside the model's vocabulary of {self._vocab_size}")
        if not np.isfinite(sampled_logprobs).all() or (sampled_logprobs > _LOGPROB_CEILING).any():
            raise EngineError("a sampled logprob is positive or not finite")
        return sampled_ids, sampled_logprobs

    def _in_vocabulary(self, ids: Ids) -> bool:
        return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size)


def _as_ids(ids: ArrayLike) -> Ids:
    values = np.asarray(ids)
    if values.size == 0:
        return np.empty(0, dtype=np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError("token ids must be one list of integers")
    if values.dtype != np.int32 and (values.min() < 0 or values.max() > np.iinfo(np.int32).max):
        raise ValueError("a token id does not fit into 32 bits")
    return values.astype(np.int32, copy=False)


def _common_prefix(left: Ids, right: Ids) -> int:
    """How many leading values two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _check_cover(spans: Sequence[VersionSpan], length: int) -> None:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start or span.weight_version < 0:
            raise EngineError(
                f"weight version span [{span.start}, {span.end}) does not continue at {position}"
            )
        position = span.end
    if position != length:
        raise EngineError(f"weight version spans cover {position} of {length} sampled tokens")
