"""Group-relative advantages: how much better a trajectory did than others of the same task.

For rewards R_1..R_G of one group (GRPO, Shao et al., arXiv:2402.03300; Dr. GRPO, Liu et al.,
arXiv:2503.20783; leave-one-out, Ahmadian et al., arXiv:2402.14740):

    group_std       A_i = (R_i - mean) / std      std over the population (divided by G)
    group_mean      A_i = R_i - mean
    leave_one_out   A_i = R_i - mean of the others

Groups are formed by id, never by position. A reward that is missing or not finite takes no part in its
group's statistics, gets advantage 0 and is counted. A group whose rewards are all equal gets exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import torch

# N trajectory, G trajectory of one group

# Rewards closer than this, relative to the largest or to 1, are the same reward.
_ROUNDING = 1e-9


class AdvantageKind(StrEnum):
    """The baseline and the scale of a group's advantages."""

    GROUP_STD = "group_std"
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of N trajectories and what was counted on the way."""

    advantages_N: torch.Tensor  # float64; exactly 0 where not valid
    valid_N: torch.Tensor  # bool; False where the reward is missing or not finite
    num_groups: int
    num_zero_variance_groups: int  # among groups with at least one valid reward
    num_invalid: int


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    *,
    kind: AdvantageKind = AdvantageKind.GROUP_STD,
    reward_range: tuple[float, float] | None = None,
) -> Advantages:
    """Advantage of every trajectory against the others of its group, in the order given.

    `rewards` holds None where a trajectory was not graded. Finite rewards are clipped to `reward_range`
    before any statistic; None leaves them as they are.
    """
    rewards_N = torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64)
    valid_N = torch.isfinite(rewards_N)
    if reward_range is not None:
        rewards_N = rewards_N.clamp(*reward_range)
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    if len(group_ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")

    advantages_N = torch.zeros_like(rewards_N)
    num_zero_variance = 0
    for indices in members.values():
        valid = [index for index in indices if valid_N[index]]
        if not valid:
            continue
        rewards_G = rewards_N[valid]
        if _all_equal(rewards_G):
            num_zero_variance += 1
            continue
        advantages_N[valid] = _advantages(rewards_G, kind)
    return Advantages(
        advantages_N=advantages_N,
        valid_N=valid_N,
        num_groups=len(members),
        num_zero_variance_groups=num_zero_variance,
        num_invalid=int((~valid_N).sum()),
    )


def _all_equal(rewards_G: torch.Tensor) -> bool:
    # Decided by the spread: equal floats need not deviate by 0 from their mean, and a reward summed in
    # another order differs in its last bits, which division by the deviation would blow up to 1.
    spread = rewards_G.max() - rewards_G.min()
    return bool(spread <= _ROUNDING * rewards_G.abs().max().clamp(min=1.0))


def _advantages(rewards_G: torch.Tensor, kind: AdvantageKind) -> torch.Tensor:
    deviations_G = rewards_G - rewards_G.mean()
    match kind:
        case AdvantageKind.GROUP_STD:
            # Two passes: E[x^2] - E[x]^2 cancels to a negative number for nearly equal rewards.
            return deviations_G / deviations_G.square().mean().sqrt()
        case AdvantageKind.GROUP_MEAN:
            return deviations_G
        case AdvantageKind.LEAVE_ONE_OUT:
            size = rewards_G.numel()
            return deviations_G * (size / (size - 1))
    assert_never(kind)
