"""A step's metrics as they are stored and shown: one flat name a figure, seconds and ratios.

A figure that is not finite becomes null: JSON has no other word for it, and a reader must see that
it is not a number.
"""

import math
from typing import Any

from services.trainer.step import StepOutcome


def step_metrics(outcome: StepOutcome, *, wait_s: float, commit_s: float) -> dict[str, Any]:
    """The figures of one step."""
    result, staleness = outcome.result, outcome.staleness
    return {
        "loss": _finite(result.loss),
        "grad_norm": _finite(result.grad_norm),
        "lr": _finite(result.learning_rate),
        "updated": result.updated,
        "skipped_reason": result.skipped_reason,
        "reward_mean": _finite(outcome.reward_mean),
        "reward_std": _finite(outcome.reward_std),
        "groups": outcome.num_groups,
        "zero_variance_groups": outcome.num_zero_variance_groups,
        "trajectories": outcome.num_trajectories,
        "infra_failed": outcome.num_infra_failed,
        "cancelled": outcome.num_cancelled,
        "quarantined": outcome.num_quarantined,
        "mean_turns": _finite(outcome.mean_turns),
        "mean_sampled_tokens": _finite(outcome.mean_sampled_tokens),
        "tokens_trained": result.num_tokens_trained,
        "tokens_rejected": result.num_tokens_rejected,
        "tokens_total": result.num_tokens,
        "tokens_computed": result.num_tokens_computed,
        "tokens_by_reason": outcome.tokens_by_reason,
        "microbatches": result.num_microbatches,
        "staleness": None
        if staleness is None
        else {"min": staleness.min, "mean": _finite(staleness.mean), "max": staleness.max},
        "ratio_mean": _finite(result.ratio_mean),
        "clip_fraction_low": _finite(result.clip_fraction_low),
        "clip_fraction_high": _finite(result.clip_fraction_high),
        "mismatch_kl": _finite(result.mismatch_kl),
        "logprob_mismatch_max": _finite(result.logprob_mismatch_max),
        "drift_kl": _finite(result.drift_kl),
        "logprob_drift_max": _finite(result.logprob_drift_max),
        "reference_kl": _finite(result.reference_kl),
        "entropy": _finite(result.entropy),
        "seconds": _finite(result.seconds),
        "wait_s": _finite(wait_s),
        "commit_s": _finite(commit_s),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
