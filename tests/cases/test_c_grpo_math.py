"""Cases C: the mathematics of a step. Each test is one case, by its id."""

import math

import pytest
import torch

from services.trainer.algorithms.advantage import AdvantageKind, group_advantages
from services.trainer.algorithms.aggregation import (
    Aggregation,
    counted_trajectories,
    divisor_part,
    row_weights,
    weighted_sum,
)
from services.trainer.algorithms.kl import kl_divergence
from services.trainer.algorithms.logprobs import scaled, token_logprobs
from services.trainer.algorithms.loss import policy_loss
from services.trainer.algorithms.objective import OffPolicy, OldPolicy, PolicyObjective, token_losses
from services.trainer.algorithms.ratio import diverged_sequences, truncated_weights, within_band


def test_C01_all_rewards_equal_then_exactly_zero_and_counted() -> None:
    result = group_advantages([1, 1, 1, 1], ["g"] * 4)
    assert result.advantages_N.tolist() == [0, 0, 0, 0]
    assert result.num_zero_variance_groups == 1


@pytest.mark.parametrize("kind", list(AdvantageKind))
def test_C02_equal_floats_then_exactly_zero(kind: AdvantageKind) -> None:
    result = group_advantages([0.1, 0.1, 0.1], ["g"] * 3, kind=kind)
    assert result.advantages_N.tolist() == [0, 0, 0]
    assert result.num_zero_variance_groups == 1


def test_C04_deviation_is_over_the_population() -> None:
    result = group_advantages([0, 0, 0, 1], ["g"] * 4)
    assert result.advantages_N.tolist() == pytest.approx([-0.57735, -0.57735, -0.57735, 1.73205], abs=1e-5)


def test_C05_nan_and_missing_rewards_then_masked_and_counted() -> None:
    for absent in (math.nan, None):
        result = group_advantages([1, absent, 0, 1], ["g"] * 4)
        # The case's own numbers divide by n - 1; over the population they are sqrt(3/2) times as large.
        expected = [x * math.sqrt(1.5) for x in (0.57735, 0, -1.1547, 0.57735)]
        assert result.advantages_N.tolist() == pytest.approx(expected, abs=1e-4)
        assert result.valid_N.tolist() == [True, False, True, True]
        assert result.num_invalid == 1


def test_C06_infinite_and_huge_rewards_then_invalid_and_clipped() -> None:
    result = group_advantages([1, math.inf, 0, 1e30], ["g"] * 4, reward_range=(0.0, 1.0))
    assert result.valid_N.tolist() == [True, False, True, True]
    third = 1 / math.sqrt(2)
    assert result.advantages_N.tolist() == pytest.approx([third, 0, -math.sqrt(2), third])


def test_C08_no_trainable_token_then_zero_with_zero_gradient() -> None:
    loss = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    kept = torch.zeros(3, dtype=torch.bool)
    total = weighted_sum(loss, torch.ones(3), kept)
    total.backward()
    assert total.item() == 0
    assert loss.grad is not None
    assert loss.grad.tolist() == [0, 0, 0]
    assert divisor_part(Aggregation.TOKEN_MEAN, kept, 0) == 0


def test_C09_nan_at_a_masked_position_then_loss_and_gradient_stay_finite() -> None:
    loss = torch.tensor([0.5, math.nan], requires_grad=True)
    total = weighted_sum(loss, torch.ones(2), torch.tensor([True, False]))
    total.backward()
    assert total.item() == 0.5
    assert loss.grad is not None
    assert loss.grad.tolist() == [1, 0]


def test_C10_token_mean_is_the_same_for_any_split() -> None:
    losses = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    for sizes in ([2, 6], [8], [1] * 8):
        total, divisor = 0.0, 0
        for part in torch.split(torch.tensor(losses), sizes):
            kept = torch.ones(part.shape, dtype=torch.bool)
            total += weighted_sum(part, torch.ones(part.shape), kept).item()
            divisor += divisor_part(Aggregation.TOKEN_MEAN, kept, 0)
        assert total / divisor == 0.25


def test_C13_trajectory_of_many_rows_counts_once() -> None:
    trajectories = ["a"] + ["b"] * 9
    weights = row_weights([1] * 10, trajectories, Aggregation.TRAJECTORY_MEAN)
    kept = torch.ones(10, dtype=torch.bool)
    total = weighted_sum(torch.tensor([1.0] + [0.0] * 9), torch.tensor(weights), kept).item()
    divisor = divisor_part(
        Aggregation.TRAJECTORY_MEAN, kept, sum(counted_trajectories([1] * 10, trajectories))
    )
    assert (total, divisor, total / divisor) == (1.0, 2, 0.5)


def test_C15_dual_clip_bounds_negative_advantages_only() -> None:
    ratios, advantages = torch.tensor([10.0, 10.0]), torch.tensor([-1.0, 1.0])
    bounded = policy_loss(ratios, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert bounded.loss_K.tolist() == pytest.approx([3.0, -1.2])
    plain = policy_loss(ratios, advantages, clip_low=0.2, clip_high=0.2)
    assert plain.loss_K.tolist() == pytest.approx([10.0, -1.2])
    with pytest.raises(ValueError, match="dual_clip"):
        policy_loss(ratios, advantages, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
    with pytest.raises(ValueError, match="dual_clip"):
        PolicyObjective(dual_clip=1.0)


def test_C16_clip_higher_has_two_bounds() -> None:
    ratios = torch.tensor([1.25, 1.3, 0.75, 1.3], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss_K = policy_loss(ratios, advantages, clip_low=0.2, clip_high=0.28).loss_K
    loss_K.sum().backward()
    assert loss_K.tolist() == pytest.approx([-1.25, -1.28, 0.8, 1.3])
    assert ratios.grad is not None
    assert ratios.grad.tolist() == [-1, 0, 0, 1]


def test_C17_k3_far_apart_then_value_and_gradient_finite() -> None:
    logprob = torch.tensor([-101.0], requires_grad=True)
    kl = kl_divergence(logprob, torch.tensor([-1.0]))
    kl.sum().backward()
    assert math.isfinite(kl.item())
    assert logprob.grad is not None
    assert math.isfinite(logprob.grad.item())
    near = kl_divergence(torch.tensor([-1.5], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64))
    assert near.item() == pytest.approx(math.exp(0.5) - 0.5 - 1, rel=1e-12)


def test_C19_truncated_weights_are_capped_finite_and_detached() -> None:
    old = torch.tensor([0.0, 2.0, 1000.0, -1000.0], requires_grad=True)
    weights = truncated_weights(old, torch.zeros(4), cap=2.0)
    assert weights.tolist() == pytest.approx([1, 2, 2, 0])
    assert weights.shape == old.shape
    assert not weights.requires_grad


def test_C20_rejected_tokens_leave_the_denominator() -> None:
    log_ratios = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3])
    kept = within_band(log_ratios, torch.zeros(5), 0.5, 2.0)
    assert kept.nonzero().flatten().tolist() == [0, 4]
    losses = token_losses(
        PolicyObjective(off_policy=OffPolicy.MASK, old_policy=OldPolicy.RECOMPUTED, off_policy_cap=2.0),
        log_ratios - 20,
        rollout_logprobs_K=torch.full((5,), -20.0),
        advantages_K=torch.ones(5),
    )
    assert losses.kept_K.tolist() == kept.tolist()
    assert divisor_part(Aggregation.TOKEN_MEAN, losses.kept_K, 0) == 2


def test_C21_temperature_divides_the_logits() -> None:
    logits = scaled(torch.tensor([[2.0, 1.0, 0.0]]), 0.5)
    logprob = token_logprobs(logits, torch.tensor([0]), torch.tensor([0]))
    assert logprob.item() == pytest.approx(-0.14293163, abs=1e-6)


def test_C23_groups_are_formed_by_id_whatever_the_order() -> None:
    samples = [("a", 1.0), ("b", 0.0), ("a", 0.0), ("b", 0.0), ("b", 1.0)]
    expected = [0.5, -0.33333, -0.5, -0.33333, 0.66667]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        result = group_advantages(
            [samples[i][1] for i in order], [samples[i][0] for i in order], kind=AdvantageKind.GROUP_MEAN
        )
        assert result.advantages_N.tolist() == pytest.approx([expected[i] for i in order], abs=1e-5)
        assert result.num_groups == 2


def test_C24_zero_variance_groups_are_counted() -> None:
    result = group_advantages([1, 1, 1, 0], ["same", "same", "mixed", "mixed"])
    assert result.num_zero_variance_groups == 1
    assert result.advantages_N.tolist() == [0, 0, 1, -1]


def test_C25_long_failure_of_an_old_policy_is_left_out_and_a_success_kept() -> None:
    tokens = 30_000
    new, rollout = torch.full((2 * tokens,), -4.0), torch.full((2 * tokens,), -1.0)
    ids = ["failed"] * tokens + ["passed"] * tokens
    advantages = torch.tensor([-1.0] * tokens + [1.0] * tokens)
    diverged = diverged_sequences(new, rollout, ids, advantages, threshold=1.0)
    assert bool(diverged[:tokens].all())
    assert not bool(diverged[tokens:].any())


@pytest.mark.parametrize(("advantage", "sign"), [(1.0, 1), (-1.0, -1), (0.0, 0)])
def test_C27_one_step_moves_the_sampled_token_the_way_of_its_advantage(advantage: float, sign: int) -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.1)
    logprobs = token_logprobs(scaled(logits, 1.0), torch.tensor([0]), torch.tensor([0]))
    losses = token_losses(
        PolicyObjective(),
        logprobs,
        rollout_logprobs_K=logprobs.detach(),
        advantages_K=torch.tensor([advantage]),
    )
    losses.loss_K.sum().backward()
    optimizer.step()
    change = torch.softmax(logits.detach(), -1)[0, 0].item() - 0.5
    assert (change > 1e-7) - (change < -1e-7) == sign
