"""What a step optimises: the choices of a run, checked when made, and the token losses they give.

`token_losses` is where ratio, correction, clipping and KL meet; every trainer backend calls it with the
logprobs of one micro-batch and adds up what it returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from services.trainer.algorithms.aggregation import Aggregation
from services.trainer.algorithms.kl import KlEstimator, kl_divergence
from services.trainer.algorithms.loss import negative_log_likelihood, policy_loss
from services.trainer.algorithms.ratio import importance_ratio, truncated_weights, within_band

__all__ = [
    "Aggregation",
    "KlEstimator",
    "Objective",
    "OffPolicy",
    "OldPolicy",
    "PolicyObjective",
    "SftObjective",
    "TokenLosses",
    "token_losses",
]

# K token of a micro-batch


class OffPolicy(StrEnum):
    """What happens to tokens whose rollout policy differs from the policy the update starts from."""

    NONE = "none"
    TRUNCATE = "truncate"  # weighted by min(old / rollout, cap)
    MASK = "mask"  # rejected where old / rollout is outside [1 / cap, cap]


class OldPolicy(StrEnum):
    """Whose logprobs the importance ratio is taken against."""

    ROLLOUT = "rollout"  # those recorded at sampling
    RECOMPUTED = "recomputed"  # the trainer's own before the update


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """Masked GRPO with PPO clipping. Raises `ValueError` naming the field that is out of range."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None  # None = off
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_tokens: int | None = None  # tokens per trajectory that `constant` divides by
    off_policy: OffPolicy = OffPolicy.NONE
    off_policy_cap: float = 2.0
    old_policy: OldPolicy = OldPolicy.ROLLOUT
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must be in [0, 1), not {self.clip_low}")
        if not (math.isfinite(self.clip_high) and self.clip_high >= 0):
            raise ValueError(f"clip_high must be finite and >= 0, not {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")
        if not (math.isfinite(self.off_policy_cap) and self.off_policy_cap >= 1):
            raise ValueError(f"off_policy_cap must be finite and >= 1, not {self.off_policy_cap}")
        if not (math.isfinite(self.kl_coef) and self.kl_coef >= 0):
            raise ValueError(f"kl_coef must be finite and >= 0, not {self.kl_coef}")
        if self.off_policy is OffPolicy.TRUNCATE and self.old_policy is OldPolicy.ROLLOUT:
            raise ValueError(
                "off_policy truncate needs old_policy recomputed: "
                "against rollout the ratio holds the correction already"
            )
        _check_constant(self.aggregation, self.constant_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftObjective:
    """Negative log-likelihood of the trained tokens."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_constant(self.aggregation, self.constant_tokens)


Objective = PolicyObjective | SftObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Losses of K tokens, and the figures a step reports, detached."""

    loss_K: torch.Tensor
    kept_K: torch.Tensor  # bool; False where the off-policy correction rejected the token
    ratio_K: torch.Tensor
    clipped_low_K: torch.Tensor
    clipped_high_K: torch.Tensor
    drift_kl_K: torch.Tensor  # k3 of KL(rollout || trainer)
    drift_K: torch.Tensor  # |trainer - rollout| logprob
    reference_kl_K: torch.Tensor


def token_losses(
    objective: Objective,
    logprobs_K: torch.Tensor,
    *,
    rollout_logprobs_K: torch.Tensor,
    advantages_K: torch.Tensor,
    reference_logprobs_K: torch.Tensor | None = None,
) -> TokenLosses:
    """Token losses of a micro-batch under `objective`.

    `logprobs_K` are the trainer's, with gradient, before the update. Since a step takes one update, they
    are also the recomputed old policy: detached, at no further cost. `reference_logprobs_K` is needed where
    `kl_coef > 0`.
    """
    if isinstance(objective, SftObjective):
        return _sft_losses(logprobs_K)
    current_K = logprobs_K.detach()
    old_K = rollout_logprobs_K if objective.old_policy is OldPolicy.ROLLOUT else current_K
    ratio_K = importance_ratio(logprobs_K, old_K)
    policy = policy_loss(
        ratio_K,
        advantages_K,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
    )
    loss_K = policy.loss_K
    kept_K = torch.ones(loss_K.shape, dtype=torch.bool)
    cap = objective.off_policy_cap
    if objective.off_policy is OffPolicy.TRUNCATE:
        loss_K = loss_K * truncated_weights(current_K, rollout_logprobs_K, cap)
    elif objective.off_policy is OffPolicy.MASK:
        kept_K = within_band(current_K, rollout_logprobs_K, 1 / cap, cap)
    reference_kl_K = torch.zeros_like(current_K)
    if objective.kl_coef > 0:
        if reference_logprobs_K is None:
            raise ValueError("kl_coef needs the logprobs of a reference policy")
        kl_K = kl_divergence(logprobs_K, reference_logprobs_K, objective.kl_estimator)
        loss_K = loss_K + objective.kl_coef * kl_K
        reference_kl_K = kl_K.detach()
    return TokenLosses(
        loss_K=loss_K,
        kept_K=kept_K,
        ratio_K=ratio_K.detach(),
        clipped_low_K=policy.clipped_low_K,
        clipped_high_K=policy.clipped_high_K,
        drift_kl_K=kl_divergence(rollout_logprobs_K, current_K),
        drift_K=(current_K - rollout_logprobs_K).abs(),
        reference_kl_K=reference_kl_K,
    )


def _sft_losses(logprobs_K: torch.Tensor) -> TokenLosses:
    zeros_K = torch.zeros(logprobs_K.shape)
    none_K = torch.zeros(logprobs_K.shape, dtype=torch.bool)
    return TokenLosses(
        loss_K=negative_log_likelihood(logprobs_K),
        kept_K=~none_K,
        ratio_K=torch.ones(logprobs_K.shape),
        clipped_low_K=none_K,
        clipped_high_K=none_K,
        drift_kl_K=zeros_K,
        drift_K=zeros_K,
        reference_kl_K=zeros_K,
    )


def _check_constant(aggregation: Aggregation, constant_tokens: int | None) -> None:
    if aggregation is Aggregation.CONSTANT and (constant_tokens is None or constant_tokens < 1):
        raise ValueError(f"constant_tokens must be >= 1 for aggregation constant, not {constant_tokens}")
