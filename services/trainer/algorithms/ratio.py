"""Importance ratios and the correction for tokens that another policy sampled.

Three policies meet at a token: the one that sampled it (rollout), the one the update starts from (old) and
the one being updated (new). new/old is the PPO ratio (Schulman et al., arXiv:1707.06347); old/rollout is the
correction of decoupled PPO (Hilton et al., arXiv:2110.00641), here truncated or masked per token.

Every exponential has its argument bounded first: bounding the result leaves an infinite derivative behind.
Weights and masks never carry a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

# K token

# e^20 is about 5e8: far above any ratio that training survives, far below what float32 overflows at.
MAX_LOG_RATIO = 20.0


def importance_ratio(logprobs_K: torch.Tensor, old_logprobs_K: torch.Tensor) -> torch.Tensor:
    """pi_new(token) / pi_old(token) = exp(logprob - old logprob); gradient through `logprobs_K` only."""
    log_ratio_K = logprobs_K - old_logprobs_K.detach()
    return log_ratio_K.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(
    old_logprobs_K: torch.Tensor, rollout_logprobs_K: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(pi_old / pi_rollout, cap), the truncated importance weight (Ionides, 2008). Detached."""
    log_weight_K = (old_logprobs_K - rollout_logprobs_K).detach()
    return log_weight_K.clamp(max=math.log(cap)).exp()


def within_band(
    old_logprobs_K: torch.Tensor, rollout_logprobs_K: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """True where low <= pi_old / pi_rollout <= high; a token outside is rejected from the loss."""
    log_ratio_K = (old_logprobs_K - rollout_logprobs_K).detach()
    return (log_ratio_K >= math.log(low)) & (log_ratio_K <= math.log(high))


def diverged_sequences(
    logprobs_K: torch.Tensor,
    rollout_logprobs_K: torch.Tensor,
    sequence_ids_K: Sequence[Hashable],
    advantages_K: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """True at tokens of sequences the new policy has left behind (DeepSeek-V3.2, arXiv:2512.02556).

    A sequence is left out where its advantage is negative and the mean of (rollout - new logprob) over its
    tokens is above `threshold`: long failures of an old policy otherwise dominate the update. Positive ones
    stay.
    """
    divergence_K = (rollout_logprobs_K - logprobs_K).detach()
    members: dict[Hashable, list[int]] = {}
    for index, sequence_id in enumerate(sequence_ids_K):
        members.setdefault(sequence_id, []).append(index)
    diverged_K = torch.zeros(divergence_K.shape, dtype=torch.bool)
    for indices in members.values():
        if bool(divergence_K[indices].mean() > threshold) and bool(advantages_K[indices[0]] < 0):
            diverged_K[indices] = True
    return diverged_K
