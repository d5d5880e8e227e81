"""Rows into packed micro-batches.

Rows that begin with the same tokens (the episodes of one group share their prompt, and often the first
tool results) share those tokens in the pack: a shared prefix goes through the model once, and its gradient
is the sum over the rows, as it would be if each had its own copy. The prediction of token t of a row is
read at that row's token t-1, wherever the pack keeps it, so the next-token shift never crosses rows.

Invariants: a micro-batch holds at most `microbatch_tokens` packed tokens; every row is in exactly one
micro-batch; no choice made here changes the step's gradient beyond rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

# T row token, N packed token, U wanted position, K trained token of the micro-batch

# A shared prefix below this many tokens costs more in kernel calls than it saves.
_MIN_SHARED_TOKENS = 16

# Attention's share of a token's cost, per token of context, relative to everything else. Measured on
# models of a few million parameters; it only steers the balance between micro-batches.
_CONTEXT_COST = 1 / 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One training sequence of T tokens, as the step hands it to the backend."""

    trajectory_id: str  # rows of one trajectory share it: trajectory means count it once
    ids_T: NDArray[np.int32]
    trained_T: NDArray[np.bool_]  # True where token t is trained; never at position 0
    rollout_logprobs_T: NDArray[np.float32]  # under the policy that sampled it; 0 elsewhere and in SFT
    advantage: float = 0.0  # of the trajectory; ignored by SFT
    # True where exactly the weights being trained sampled the token; None = nowhere.
    same_weights_T: NDArray[np.bool_] | None = None

    def check(self, vocab_size: int) -> None:
        """Raise `ValueError` where the arrays disagree or hold what cannot be trained on."""
        num_tokens = self.ids_T.shape[0]
        if self.ids_T.ndim != 1 or num_tokens == 0:
            raise ValueError(f"row of {self.trajectory_id}: ids_T must be one non-empty dimension")
        if self.trained_T.shape != (num_tokens,) or self.rollout_logprobs_T.shape != (num_tokens,):
            raise ValueError(f"row of {self.trajectory_id}: arrays of different lengths")
        if self.same_weights_T is not None and self.same_weights_T.shape != (num_tokens,):
            raise ValueError(f"row of {self.trajectory_id}: arrays of different lengths")
        if self.trained_T[0]:
            raise ValueError(f"row of {self.trajectory_id}: the first token has no context to train it in")
        if int(self.ids_T.min()) < 0 or int(self.ids_T.max()) >= vocab_size:
            raise ValueError(f"row of {self.trajectory_id}: an id is outside the vocabulary of {vocab_size}")
        if not np.isfinite(self.advantage):
            raise ValueError(f"row of {self.trajectory_id}: advantage {self.advantage} is not finite")
        if not np.isfinite(self.rollout_logprobs_T[self.trained_T]).all():
            raise ValueError(f"row of {self.trajectory_id}: a trained token's logprob is not finite")


@dataclass(slots=True, kw_only=True)
class _Node:
    """A run of tokens that `rows` share, from `depth` on, and what continues it."""

    rows: list[int]
    depth: int
    end: int  # tokens [depth, end) of any of its rows
    children: list[_Node] = field(default_factory=list)

    @property
    def num_packed(self) -> int:
        return self.end - self.depth + sum(child.num_packed for child in self.children)

    @property
    def cost(self) -> float:
        own = (self.end - self.depth) * (1 + _CONTEXT_COST * (self.end + self.depth) / 2)
        return own + sum(child.cost for child in self.children)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Packed tokens [start, end), which continue the segments of `path` in that order."""

    start: int
    end: int
    path: tuple[tuple[int, int], ...] = ()  # [start, end) of each earlier segment, outermost first

    @property
    def num_tokens(self) -> int:
        """Own tokens."""
        return self.end - self.start

    @property
    def num_path_tokens(self) -> int:
        """Tokens of the path: the position of the segment's first token."""
        return sum(end - start for start, end in self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows packed into N tokens, and where each row's tokens went."""

    row_indices: tuple[int, ...]  # in the caller's sequence
    packed_index_by_row: tuple[NDArray[np.int64], ...]  # [T] packed token of every token of the row
    segments: tuple[Segment, ...]  # in packed order
    ids_N: torch.Tensor
    positions_N: torch.Tensor

    @property
    def num_packed(self) -> int:
        """N."""
        return int(self.ids_N.numel())


def pack(ids_by_row: Sequence[NDArray[np.int32]], microbatch_tokens: int) -> list[Microbatch]:
    """Pack rows into micro-batches of at most `microbatch_tokens`, of nearly equal cost.

    Raises `ValueError` for a row longer than the bound.
    """
    for index, ids_T in enumerate(ids_by_row):
        if ids_T.shape[0] > microbatch_tokens:
            raise ValueError(
                f"row {index} has {ids_T.shape[0]} tokens, more than microbatch_tokens {microbatch_tokens}"
            )
    order = sorted(range(len(ids_by_row)), key=lambda index: ids_by_row[index].astype(">i4").tobytes())
    shared = [_common_prefix(ids_by_row[a], ids_by_row[b]) for a, b in itertools.pairwise(order)]
    lengths = [ids_by_row[index].shape[0] for index in order]
    runs = _balanced_runs(shared, lengths, microbatch_tokens)
    return [_microbatch(_trees(run, order, shared, lengths), ids_by_row) for run in runs]


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    size = min(a.shape[0], b.shape[0])
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if differing.size else size


def _balanced_runs(shared: Sequence[int], lengths: Sequence[int], bound: int) -> list[range]:
    """Cut the sorted rows into the fewest runs of about equal cost that each stay within the bound.

    Runs of the sorted order keep rows that share a prefix together, so a cut costs one prefix at most.
    """
    # What each row adds when it follows the one before it.
    known = [0, *shared][: len(lengths)]
    costs = [
        (length - seen) * (1 + _CONTEXT_COST * (length + seen) / 2)
        for length, seen in zip(lengths, known, strict=True)
    ]
    edge_costs = np.concatenate([[0.0], np.cumsum(costs)])
    for num_runs in range(1, len(lengths) + 1):
        targets = edge_costs[-1] * np.arange(1, num_runs) / num_runs
        inner = np.abs(edge_costs[:, None] - targets[None, :]).argmin(axis=0).tolist()
        edges = sorted({0, *inner, len(lengths)})
        runs = [range(first, last) for first, last in itertools.pairwise(edges)]
        if all(_num_packed(run, shared, lengths) <= bound for run in runs):
            return runs
    # Rows so uneven that equal costs never fit: every row fits alone.
    return [range(index, index + 1) for index in range(len(lengths))]


def _num_packed(run: range, shared: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(root.num_packed for root in _trees(run, range(len(lengths)), shared, lengths))


def _trees(run: range, order: Sequence[int], shared: Sequence[int], lengths: Sequence[int]) -> list[_Node]:
    """The trees of a run; `order` names the row at each sorted place."""
    rows = [order[index] for index in run]
    return _grow(rows, list(shared[run.start : run.stop - 1]), list(lengths[run.start : run.stop]), 0)


def _grow(rows: list[int], shared: list[int], lengths: list[int], depth: int) -> list[_Node]:
    """The tree of what `rows`, sorted and alike in their first `depth` tokens, share from there on."""
    nodes: list[_Node] = []
    first = 0
    for last in range(1, len(rows) + 1):
        if last < len(rows) and shared[last - 1] - depth >= _MIN_SHARED_TOKENS:
            continue
        if last - first == 1:
            if lengths[first] > depth:
                nodes.append(_Node(rows=[rows[first]], depth=depth, end=lengths[first]))
        else:
            end = min(shared[first : last - 1])
            node = _Node(rows=rows[first:last], depth=depth, end=end)
            node.children = _grow(rows[first:last], shared[first : last - 1], lengths[first:last], end)
            nodes.append(node)
        first = last
    return nodes


def _microbatch(roots: Sequence[_Node], ids_by_row: Sequence[NDArray[np.int32]]) -> Microbatch:
    placed: list[tuple[_Node, tuple[_Node, ...]]] = []

    def place(node: _Node, path: tuple[_Node, ...]) -> None:
        placed.append((node, path))
        for child in node.children:
            place(child, (*path, node))

    for root in roots:
        place(root, ())
    # Segments of like size side by side: attention runs over blocks of neighbours with little padding.
    placed.sort(key=lambda item: (bool(item[1]), item[0].end - item[0].depth, item[0].depth))

    range_of: dict[int, tuple[int, int]] = {}
    start = 0
    for node, _ in placed:
        range_of[id(node)] = (start, start + node.end - node.depth)
        start = range_of[id(node)][1]
    segments: list[Segment] = []
    ids: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    pieces: dict[int, list[tuple[int, int]]] = {row: [] for root in roots for row in root.rows}
    for node, path in placed:
        own = range_of[id(node)]
        segments.append(Segment(start=own[0], end=own[1], path=tuple(range_of[id(above)] for above in path)))
        ids.append(ids_by_row[node.rows[0]][node.depth : node.end])
        positions.append(np.arange(node.depth, node.end))
    # A parent's tokens come before its children's in every row.
    for node, _ in sorted(placed, key=lambda item: item[0].depth):
        for row in node.rows:
            pieces[row].append(range_of[id(node)])
    return Microbatch(
        row_indices=tuple(pieces),
        packed_index_by_row=tuple(
            np.concatenate([np.arange(a, b) for a, b in ranges]) for ranges in pieces.values()
        ),
        segments=tuple(segments),
        ids_N=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        positions_N=torch.from_numpy(np.concatenate(positions)),
    )
