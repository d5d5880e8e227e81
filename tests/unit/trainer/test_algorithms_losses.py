"""Ratios, KL, token losses and logprobs: hand-computed numbers and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.kl import KlEstimator, kl_divergence
from services.trainer.algorithms.logprobs import entropies, scaled, token_logprobs
from services.trainer.algorithms.loss import policy_loss
from services.trainer.algorithms.objective import (
    Aggregation,
    OffPolicy,
    OldPolicy,
    PolicyObjective,
    SftObjective,
    token_losses,
)


def test_importance_ratio_when_policy_moved_then_loss_and_counts_follow() -> None:
    loss = policy_loss(
        torch.tensor([0.5, 0.5, 2.0, 2.0]), torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.3
    )
    assert loss.loss_K.tolist() == pytest.approx([-0.5, 0.8, -1.3, 2.0])
    assert loss.clipped_low_K.tolist() == [False, True, False, False]
    assert loss.clipped_high_K.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # d = log(1/2): k1 = -d; k2 = d^2/2; k3 = e^d - d - 1. Derivative by the policy's logprob.
        (KlEstimator.K1, math.log(2), 1.0),
        (KlEstimator.K2, math.log(2) ** 2 / 2, math.log(2)),
        (KlEstimator.K3, 0.5 + math.log(2) - 1, 0.5),
    ],
)
def test_kl_estimators_when_policy_is_twice_as_sure_then_hand_computed(
    estimator: KlEstimator, value: float, gradient: float
) -> None:
    logprob = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    kl = kl_divergence(logprob, torch.tensor([math.log(0.25)], dtype=torch.float64), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(gradient)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_for_any_logprobs_then_never_negative(logprob: float, other: float) -> None:
    assert kl_divergence(torch.tensor([logprob]), torch.tensor([other])).item() >= 0


def test_entropies_when_uniform_or_certain_then_log_size_or_zero() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    assert entropies(logits).tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)


def test_token_logprobs_when_one_position_scores_two_tokens_then_both_from_its_distribution() -> None:
    logits = scaled(torch.tensor([[0.0, math.log(3)]]), 1.0)
    logprobs = token_logprobs(logits, torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.75])


def test_objective_when_truncated_against_recomputed_then_weight_scales_the_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    objective = PolicyObjective(
        off_policy=OffPolicy.TRUNCATE, old_policy=OldPolicy.RECOMPUTED, off_policy_cap=2.0
    )
    # trainer / rollout is e^-1 for the first token and e^1 for the second, which the cap bounds to 2.
    losses = token_losses(
        objective,
        logprobs,
        rollout_logprobs_K=torch.tensor([0.0, -2.0]),
        advantages_K=torch.tensor([1.0, 1.0]),
    )
    losses.loss_K.sum().backward()
    assert losses.ratio_K.tolist() == [1.0, 1.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(-1), -2.0])


def test_objective_when_kl_term_then_added_and_reported() -> None:
    logprobs = torch.tensor([-1.0])
    inputs = {"rollout_logprobs_K": torch.tensor([-1.0]), "advantages_K": torch.tensor([0.0])}
    objective = PolicyObjective(kl_coef=0.5, kl_estimator=KlEstimator.K2)
    losses = token_losses(objective, logprobs, reference_logprobs_K=torch.tensor([-3.0]), **inputs)
    assert losses.loss_K.tolist() == pytest.approx([1.0])
    assert losses.reference_kl_K.tolist() == pytest.approx([2.0])
    with pytest.raises(ValueError, match="reference"):
        token_losses(objective, logprobs, **inputs)


def test_sft_objective_then_negative_log_likelihood() -> None:
    losses = token_losses(
        SftObjective(),
        torch.tensor([-0.5, -2.0]),
        rollout_logprobs_K=torch.zeros(2),
        advantages_K=torch.zeros(2),
    )
    assert losses.loss_K.tolist() == [0.5, 2.0]
    assert losses.drift_K.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"off_policy_cap": 0.5}, "off_policy_cap"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"off_policy": OffPolicy.TRUNCATE}, "old_policy"),
        ({"aggregation": Aggregation.CONSTANT}, "constant_tokens"),
    ],
)
def test_objective_when_an_option_is_out_of_range_then_refused_by_name(
    options: dict[str, object], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        PolicyObjective(**options)  # type: ignore[arg-type]
