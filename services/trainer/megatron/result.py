"""What a step reports: sums gathered over its micro-batches, and the result they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.trainer.algorithms.objective import TokenLosses

# K trained token of a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one call of `MegatronBackend.train` did. Ratios and logprobs are those before the update."""

    step: int  # optimizer steps taken so far, this one included when `updated`
    updated: bool
    skipped_reason: str  # "" when updated, else "no_trained_tokens" | "non_finite_gradient"
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float  # the rate this step used
    ratio_mean: float  # trainer / old policy, mean over trained tokens; 1 for SFT
    clip_fraction_low: float
    clip_fraction_high: float
    # Of trained tokens that exactly these weights sampled: what differs is how engine and trainer compute.
    mismatch_kl: float | None  # k3 estimate of KL(rollout || trainer), mean; None = there is no such token
    logprob_mismatch_max: float | None  # max |trainer - rollout|; None likewise
    # Of all trained tokens: how far the policy moved since it sampled comes on top. 0 for SFT.
    drift_kl: float
    logprob_drift_max: float
    reference_kl: float  # estimate of KL(policy || reference), 0 without a KL term
    entropy: float  # nats, mean over trained tokens, at the run's temperature
    num_tokens_trained: int  # in the loss
    num_tokens_rejected: int  # trained by the mask, rejected by the off-policy correction
    num_tokens: int  # of all rows
    num_tokens_computed: (
        int  # that went through the model: shared prefixes once, nothing after the last target
    )
    num_microbatches: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of rows per second of the step."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class StepFigures:
    """Sums over the micro-batches of one step."""

    loss_sum: float = 0.0
    divisor: int = 0
    num_kept: int = 0
    num_rejected: int = 0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    num_same_weights: int = 0
    mismatch_kl: float = 0.0
    mismatch_max: float = 0.0
    drift_kl: float = 0.0
    drift_max: float = 0.0
    reference_kl: float = 0.0
    entropy: float = 0.0

    def add(
        self,
        losses: TokenLosses,
        entropy_K: torch.Tensor,
        same_weights_K: torch.Tensor,
        loss_sum: float,
        divisor: int,
    ) -> None:
        """Add one micro-batch. Rejected tokens enter mismatch and drift: it is why they were rejected."""
        num_kept = int(losses.kept_K.sum())
        self.loss_sum += loss_sum
        self.divisor += divisor
        self.num_kept += num_kept
        self.num_rejected += losses.kept_K.numel() - num_kept
        self.ratio += float(losses.ratio_K.sum())
        self.clipped_low += float(losses.clipped_low_K.sum())
        self.clipped_high += float(losses.clipped_high_K.sum())
        self.drift_kl += float(losses.drift_kl_K.sum())
        self.drift_max = max(self.drift_max, float(losses.drift_K.max()))
        if same_weights_K.any():
            self.num_same_weights += int(same_weights_K.sum())
            self.mismatch_kl += float(losses.drift_kl_K[same_weights_K].sum())
            self.mismatch_max = max(self.mismatch_max, float(losses.drift_K[same_weights_K].max()))
        self.reference_kl += float(losses.reference_kl_K.sum())
        self.entropy += float(entropy_K.sum())

    def result(
        self,
        *,
        step: int,
        updated: bool,
        skipped_reason: str,
        grad_norm: float,
        learning_rate: float,
        num_tokens: int,
        num_tokens_computed: int,
        num_microbatches: int,
        seconds: float,
    ) -> StepResult:
        """Means over the trained tokens, rejected ones included."""
        num_trained = max(1, self.num_kept + self.num_rejected)
        return StepResult(
            step=step,
            updated=updated,
            skipped_reason=skipped_reason,
            loss=self.loss_sum / max(1, self.divisor),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ratio_mean=self.ratio / num_trained,
            clip_fraction_low=self.clipped_low / num_trained,
            clip_fraction_high=self.clipped_high / num_trained,
            mismatch_kl=self.mismatch_kl / self.num_same_weights if self.num_same_weights else None,
            logprob_mismatch_max=self.mismatch_max if self.num_same_weights else None,
            drift_kl=self.drift_kl / num_trained,
            logprob_drift_max=self.drift_max,
            reference_kl=self.reference_kl / num_trained,
            entropy=self.entropy / num_trained,
            num_tokens_trained=self.num_kept,
            num_tokens_rejected=self.num_rejected,
            num_tokens=num_tokens,
            num_tokens_computed=num_tokens_computed,
            num_microbatches=num_microbatches,
            seconds=seconds,
        )
