"""Estimators of KL(policy || other) from the logprobs of tokens the policy sampled.

Schulman, "Approximating KL divergence" (2020); with d = logprob of other - logprob of policy:

    k1 = -d                 unbiased, high variance, can be negative
    k2 = d^2 / 2            biased, low variance
    k3 = e^d - d - 1        unbiased, never negative
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

import torch

from services.trainer.algorithms.ratio import MAX_LOG_RATIO

# K token


class KlEstimator(StrEnum):
    """Which estimator."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def kl_divergence(
    logprobs_K: torch.Tensor, other_logprobs_K: torch.Tensor, estimator: KlEstimator = KlEstimator.K3
) -> torch.Tensor:
    """The estimate at every token, in nats; gradient through `logprobs_K` only.

    The difference is bounded before anything is computed from it, so value and gradient stay finite.
    """
    d_K = (other_logprobs_K.detach() - logprobs_K).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case KlEstimator.K1:
            return -d_K
        case KlEstimator.K2:
            return d_K.square() / 2
        case KlEstimator.K3:
            # expm1 keeps the small differences that e^d - 1 rounds away.
            return torch.expm1(d_K) - d_K
    assert_never(estimator)
