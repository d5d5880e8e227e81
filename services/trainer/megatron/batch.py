"""A micro-batch as the model and the loss take it: tensors made once, before the step.

Owns the way from rows to tensors and the weights of the aggregation, which are counted over the whole step
before any split. Only what the loss needs is computed: a row ends before its last trained token (nothing
after it is predicted), a row without one is left out, and the head runs where a prediction is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.algorithms.aggregation import Aggregation, counted_trajectories, row_weights
from services.trainer.megatron.attention import PackedParams, plan_blocks
from services.trainer.megatron.packing import Microbatch, TrainRow, pack

# T row token, N packed token, U wanted position, K predicted token


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """A micro-batch and the K tokens to score in it, row after row."""

    row_indices: tuple[int, ...]
    num_tokens_by_row: tuple[int, ...]  # how many of the K belong to each row
    ids_N: torch.Tensor
    packed: PackedParams
    position_K: torch.Tensor  # which of the U positions predicts the token
    token_K: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Predictions with what the loss takes beside the logprobs."""

    predictions: Predictions
    rollout_logprobs_K: torch.Tensor
    same_weights_K: torch.Tensor  # bool; sampled by exactly the weights being trained
    advantages_K: torch.Tensor
    weights_K: torch.Tensor
    num_counted_trajectories: int


def prediction_batches(
    ids_by_row: Sequence[NDArray[np.int32]],
    targets_by_row: Sequence[NDArray[np.int64]],
    microbatch_tokens: int,
) -> list[Predictions]:
    """Pack rows for scoring `targets`: sorted positions >= 1 of each row, at least one a row.

    Raises `ValueError` for a row longer than `microbatch_tokens`.
    """
    # The model reads up to the token before the last target.
    read = [ids_T[: targets[-1]] for ids_T, targets in zip(ids_by_row, targets_by_row, strict=True)]
    return [
        _predictions(microbatch, ids_by_row, targets_by_row) for microbatch in pack(read, microbatch_tokens)
    ]


def _predictions(
    microbatch: Microbatch,
    ids_by_row: Sequence[NDArray[np.int32]],
    targets_by_row: Sequence[NDArray[np.int64]],
) -> Predictions:
    rows = microbatch.row_indices
    read_at = [
        packed_index_T[targets_by_row[row] - 1]
        for row, packed_index_T in zip(rows, microbatch.packed_index_by_row, strict=True)
    ]
    head_index_U, position_K = np.unique(np.concatenate(read_at), return_inverse=True)
    token_K = np.concatenate([ids_by_row[row][targets_by_row[row]] for row in rows])
    return Predictions(
        row_indices=rows,
        num_tokens_by_row=tuple(index.size for index in read_at),
        ids_N=microbatch.ids_N,
        packed=PackedParams.of(
            microbatch.positions_N, plan_blocks(microbatch.segments), torch.from_numpy(head_index_U)
        ),
        position_K=torch.from_numpy(position_K),
        token_K=torch.from_numpy(token_K.astype(np.int64)),
    )


def train_batches(
    rows: Sequence[TrainRow],
    microbatch_tokens: int,
    how: Aggregation,
    *,
    constant_tokens: int | None,
    num_kept_by_row: Sequence[int] | None = None,
) -> list[TrainBatch]:
    """The micro-batches of a step over rows that each have a trained token.

    `num_kept_by_row` counts what the off-policy correction keeps of each row, where the aggregation must
    know it beforehand; None = all trained tokens.
    """
    targets_by_row = [np.flatnonzero(row.trained_T) for row in rows]
    counts = num_kept_by_row or [targets.size for targets in targets_by_row]
    trajectory_ids = [row.trajectory_id for row in rows]
    weights = row_weights(counts, trajectory_ids, how, constant_tokens=constant_tokens)
    counted = counted_trajectories(counts, trajectory_ids)
    batches: list[TrainBatch] = []
    for predictions in prediction_batches([row.ids_T for row in rows], targets_by_row, microbatch_tokens):
        own = predictions.row_indices
        repeats = predictions.num_tokens_by_row
        batches.append(
            TrainBatch(
                predictions=predictions,
                rollout_logprobs_K=torch.from_numpy(
                    np.concatenate([rows[i].rollout_logprobs_T[targets_by_row[i]] for i in own])
                ).float(),
                same_weights_K=torch.from_numpy(
                    np.concatenate([_same_weights(rows[i])[targets_by_row[i]] for i in own])
                ),
                advantages_K=_repeated([rows[i].advantage for i in own], repeats),
                weights_K=_repeated([weights[i] for i in own], repeats),
                num_counted_trajectories=sum(counted[i] for i in own),
            )
        )
    return batches


def _same_weights(row: TrainRow) -> NDArray[np.bool_]:
    return np.zeros_like(row.trained_T) if row.same_weights_T is None else row.same_weights_T


def _repeated(values: Sequence[float], repeats: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), repeats))
