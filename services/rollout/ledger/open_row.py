"""One row under construction: growing arrays of ids and logprobs, and spans over them.

Appending costs what is appended. Values never change once they are in, so a view of the filled part
stays true after later appends and needs no copy.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from practicum.trajectory import Floats, Ids, MaskReason, MaskSpan, Row, VersionSpan

_FIRST_CAPACITY = 1024

Scalar = TypeVar("Scalar", np.int32, np.float32)


class GrowingArray(Generic[Scalar]):
    """Values in one buffer that doubles when it is full."""

    def __init__(self, dtype: type[Scalar]) -> None:
        self._buffer: NDArray[Scalar] = np.zeros(_FIRST_CAPACITY, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: NDArray[Scalar]) -> None:
        """Append values of the array's own type."""
        end = self._length + len(values)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer)), dtype=self._buffer.dtype)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = values
        self._length = end

    def view(self) -> NDArray[Scalar]:
        """The filled part, read-only, without a copy."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view


class OpenRow:
    """A row that still grows."""

    def __init__(self) -> None:
        self._ids = GrowingArray(np.int32)
        self._logprobs = GrowingArray(np.float32)
        self._mask_spans: list[MaskSpan] = []
        self._version_spans: list[VersionSpan] = []
        self.num_sampled = 0

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> Ids:
        """All ids, a read-only view."""
        return self._ids.view()

    def append_context(self, ids: Ids, reason: MaskReason) -> None:
        """Append tokens that were not sampled."""
        self._append(ids, np.zeros(len(ids), dtype=np.float32), reason)

    def append_sampled(self, ids: Ids, logprobs: Floats, version_spans: Sequence[VersionSpan]) -> None:
        """Append sampled tokens; spans count from the first of them."""
        offset = len(self._ids)
        self._append(ids, logprobs, MaskReason.MODEL)
        self.num_sampled += len(ids)
        for span in version_spans:
            self._extend_versions(
                VersionSpan(
                    start=span.start + offset,
                    end=span.end + offset,
                    weight_version=span.weight_version,
                    engine_id=span.engine_id,
                )
            )

    def to_row(self) -> Row:
        """The finished row, with arrays of its own."""
        return Row(
            token_ids_T=self._ids.view().copy(),
            logprobs_T=self._logprobs.view().copy(),
            mask_spans=tuple(self._mask_spans),
            version_spans=tuple(self._version_spans),
        )

    def _append(self, ids: Ids, logprobs: Floats, reason: MaskReason) -> None:
        if not len(ids):
            return
        start, end = len(self._ids), len(self._ids) + len(ids)
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        if self._mask_spans and self._mask_spans[-1].reason is reason:
            start = self._mask_spans.pop().start
        self._mask_spans.append(MaskSpan(start=start, end=end, reason=reason))

    def _extend_versions(self, span: VersionSpan) -> None:
        last = self._version_spans[-1] if self._version_spans else None
        same_source = last is not None and (last.end, last.weight_version, last.engine_id) == (
            span.start,
            span.weight_version,
            span.engine_id,
        )
        if last is not None and same_source:
            self._version_spans[-1] = VersionSpan(
                start=last.start, end=span.end, weight_version=last.weight_version, engine_id=last.engine_id
            )
        else:
            self._version_spans.append(span)
