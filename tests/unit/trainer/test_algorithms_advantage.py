"""Advantages: hand-computed numbers, and what must hold for any rewards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.advantage import AdvantageKind, group_advantages

rewards_lists = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)


def advantages(rewards: list[float | None], kind: AdvantageKind = AdvantageKind.GROUP_STD) -> list[float]:
    return group_advantages(rewards, ["g"] * len(rewards), kind=kind).advantages_N.tolist()


def test_group_std_when_one_of_three_fails_then_matches_hand_computed() -> None:
    assert advantages([0, 1, 1]) == pytest.approx([-math.sqrt(2), 1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_leave_one_out_when_one_of_three_passes_then_baseline_is_the_others() -> None:
    assert advantages([1, 0, 0], AdvantageKind.LEAVE_ONE_OUT) == pytest.approx([1.0, -0.5, -0.5])


def test_group_mean_when_one_of_four_passes_then_only_centred() -> None:
    assert advantages([1, 0, 0, 0], AdvantageKind.GROUP_MEAN) == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("kind", list(AdvantageKind))
def test_any_kind_when_only_one_reward_is_valid_then_zero_and_counted(kind: AdvantageKind) -> None:
    result = group_advantages([1.0, None], ["g", "g"], kind=kind)
    assert result.advantages_N.tolist() == [0.0, 0.0]
    assert (result.num_zero_variance_groups, result.num_invalid) == (1, 1)


def test_group_without_a_valid_reward_then_not_a_zero_variance_group() -> None:
    result = group_advantages([None, None], ["g", "g"])
    assert (result.num_groups, result.num_zero_variance_groups, result.num_invalid) == (1, 0, 2)


def test_lengths_that_disagree_then_value_error() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 group ids"):
        group_advantages([0.0, 1.0], ["g"])


@given(rewards_lists)
def test_group_std_for_any_rewards_then_centred_with_unit_deviation(rewards: list[float]) -> None:
    result = torch.tensor(advantages(list(rewards)), dtype=torch.float64)
    spread = max(rewards) - min(rewards)
    if spread < 1e-9:
        assert result.tolist() == [0.0] * len(rewards)
    elif spread > 1e-7:
        assert result.mean().item() == pytest.approx(0, abs=1e-6)
        assert result.square().mean().item() == pytest.approx(1, abs=1e-6)


def test_rewards_when_summed_in_another_order_then_still_zero_variance() -> None:
    assert group_advantages([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], ["g", "g"]).num_zero_variance_groups == 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), min_size=1), st.randoms()
)
def test_groups_for_any_order_then_the_same_advantages(
    samples: list[tuple[str, float]], random: object
) -> None:
    order = list(range(len(samples)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = group_advantages([r for _, r in samples], [g for g, _ in samples]).advantages_N
    shuffled = group_advantages([samples[i][1] for i in order], [samples[i][0] for i in order]).advantages_N
    assert shuffled.tolist() == pytest.approx(straight[order].tolist())
