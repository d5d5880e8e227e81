"""From the losses of tokens to the loss of a step.

    token_mean        sum of all token losses / number of tokens              (DAPO, arXiv:2503.14476, eq. 8)
    trajectory_mean   mean over trajectories of each one's token mean         (GRPO, arXiv:2402.03300, eq. 3)
    constant          sum of all token losses / (trajectories * constant)     (Dr. GRPO, arXiv:2503.20783)

Each is sum(weight * loss) / divisor over the whole step. A micro-batch contributes its part of the sum and
of the divisor, and the division happens once, after the last one; so no split changes the result. A
trajectory counts once however many rows it has, and a token that was rejected is in neither part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from enum import StrEnum
from typing import assert_never

import torch

# K token of a micro-batch, R row of the step, M row of a micro-batch


class Aggregation(StrEnum):
    """How token losses become one number."""

    TOKEN_MEAN = "token_mean"
    TRAJECTORY_MEAN = "trajectory_mean"
    CONSTANT = "constant"


def row_weights(
    num_tokens_R: Sequence[int],
    trajectory_ids_R: Sequence[Hashable],
    how: Aggregation,
    *,
    constant_tokens: int | None = None,
) -> list[float]:
    """The weight of a token of each row, from the whole step: computed before any split.

    `num_tokens_R` counts each row's tokens that enter the loss.
    """
    match how:
        case Aggregation.TOKEN_MEAN:
            return [1.0] * len(num_tokens_R)
        case Aggregation.TRAJECTORY_MEAN:
            totals = _totals(num_tokens_R, trajectory_ids_R)
            return [1.0 / max(1, totals[trajectory_id]) for trajectory_id in trajectory_ids_R]
        case Aggregation.CONSTANT:
            if constant_tokens is None or constant_tokens < 1:
                raise ValueError(f"constant_tokens must be >= 1 for constant, not {constant_tokens}")
            return [1.0 / constant_tokens] * len(num_tokens_R)
    assert_never(how)


def counted_trajectories(num_tokens_R: Sequence[int], trajectory_ids_R: Sequence[Hashable]) -> list[bool]:
    """True at the one row of each trajectory that stands for it in the divisor.

    A trajectory without a token in the loss is not counted.
    """
    seen: set[Hashable] = set()
    counted: list[bool] = []
    for num_tokens, trajectory_id in zip(num_tokens_R, trajectory_ids_R, strict=True):
        counted.append(num_tokens > 0 and trajectory_id not in seen)
        if num_tokens > 0:
            seen.add(trajectory_id)
    return counted


def weighted_sum(loss_K: torch.Tensor, weights_K: torch.Tensor, kept_K: torch.Tensor) -> torch.Tensor:
    """sum of weight * loss over kept tokens; a NaN elsewhere cannot reach it.

    Selects instead of multiplying by the mask: NaN * 0 is NaN. Without a kept token it is a 0 that still
    has a (zero) gradient.
    """
    return (loss_K[kept_K] * weights_K[kept_K]).sum()


def divisor_part(how: Aggregation, kept_K: torch.Tensor, num_counted_trajectories: int) -> int:
    """A micro-batch's part of the divisor; the parts of a step add up to the whole."""
    if how is Aggregation.TOKEN_MEAN:
        return int(kept_K.sum())
    return num_counted_trajectories


def _totals(num_tokens_R: Sequence[int], trajectory_ids_R: Sequence[Hashable]) -> Counter[Hashable]:
    totals: Counter[Hashable] = Counter()
    for num_tokens, trajectory_id in zip(num_tokens_R, trajectory_ids_R, strict=True):
        totals[trajectory_id] += num_tokens
    return totals
