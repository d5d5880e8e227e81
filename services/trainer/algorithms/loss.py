"""Losses of single tokens.

The policy loss is PPO's (arXiv:1707.06347, eq. 7) with the two bounds apart, as in DAPO (arXiv:2503.14476,
eq. 8), and the lower bound of dual clip (arXiv:1912.09729) for negative advantages:

    L = max(-A r, -A clip(r, 1 - low, 1 + high))
    L = min(L, -A c)                                   where A < 0 and dual clip c is on
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# K token


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of every token and where a bound took its gradient away."""

    loss_K: torch.Tensor
    clipped_low_K: torch.Tensor  # bool; the lower bound holds: ratio < 1 - low and advantage < 0
    clipped_high_K: torch.Tensor  # bool; the upper bound holds: ratio > 1 + high and advantage > 0


def policy_loss(
    ratio_K: torch.Tensor,
    advantages_K: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped policy loss of every token. Raises `ValueError` for dual_clip <= 1."""
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    advantages_K = advantages_K.detach()
    plain_K = -advantages_K * ratio_K
    clipped_K = -advantages_K * ratio_K.clamp(1 - clip_low, 1 + clip_high)
    loss_K = torch.maximum(plain_K, clipped_K)
    if dual_clip is not None:
        bounded_K = torch.minimum(loss_K, -advantages_K * dual_clip)
        loss_K = torch.where(advantages_K < 0, bounded_K, loss_K)
    with torch.no_grad():
        clipped_low_K = (ratio_K < 1 - clip_low) & (advantages_K < 0)
        clipped_high_K = (ratio_K > 1 + clip_high) & (advantages_K > 0)
    return PolicyLoss(loss_K=loss_K, clipped_low_K=clipped_low_K, clipped_high_K=clipped_high_K)


def negative_log_likelihood(logprobs_K: torch.Tensor) -> torch.Tensor:
    """-logprob of every token: supervised fine-tuning."""
    return -logprobs_K
