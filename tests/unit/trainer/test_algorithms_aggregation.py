"""Aggregation: the same step for any split into micro-batches."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.aggregation import (
    Aggregation,
    counted_trajectories,
    divisor_part,
    row_weights,
    weighted_sum,
)

Row = tuple[str, list[float]]  # trajectory, losses of its tokens

rows_lists = st.lists(
    st.tuples(st.sampled_from("abcd"), st.lists(st.floats(-5, 5), max_size=6)), min_size=1, max_size=12
)


def step_loss(rows: list[Row], microbatches: list[list[int]], how: Aggregation) -> float:
    """The loss of a step as a backend computes it: parts of micro-batches, divided once."""
    counts = [len(losses) for _, losses in rows]
    ids = [trajectory for trajectory, _ in rows]
    weights = row_weights(counts, ids, how, constant_tokens=10)
    counted = counted_trajectories(counts, ids)
    total, divisor = 0.0, 0
    for microbatch in microbatches:
        losses = torch.tensor([x for i in microbatch for x in rows[i][1]], dtype=torch.float64)
        weights_K = torch.tensor([weights[i] for i in microbatch for _ in rows[i][1]], dtype=torch.float64)
        kept = torch.ones(losses.shape, dtype=torch.bool)
        total += float(weighted_sum(losses, weights_K, kept))
        divisor += divisor_part(how, kept, sum(counted[i] for i in microbatch))
    return total / max(1, divisor)


def test_token_mean_when_rows_differ_in_length_then_every_token_counts_once() -> None:
    assert step_loss([("a", [1.0]), ("b", [0.0, 0.0, 0.0])], [[0, 1]], Aggregation.TOKEN_MEAN) == 0.25


def test_trajectory_mean_when_rows_differ_in_length_then_every_trajectory_counts_once() -> None:
    assert step_loss([("a", [1.0]), ("b", [0.0, 0.0, 0.0])], [[0, 1]], Aggregation.TRAJECTORY_MEAN) == 0.5


def test_constant_when_rows_differ_in_length_then_divided_by_trajectories_and_constant() -> None:
    assert step_loss([("a", [1.0]), ("b", [3.0, 3.0])], [[0, 1]], Aggregation.CONSTANT) == pytest.approx(0.35)


@pytest.mark.parametrize("how", list(Aggregation))
@given(rows=rows_lists, cuts=st.lists(st.integers(0, 11), max_size=4))
def test_step_loss_for_any_split_then_the_same(how: Aggregation, rows: list[Row], cuts: list[int]) -> None:
    whole = step_loss(rows, [list(range(len(rows)))], how)
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    split = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
    assert step_loss(rows, split, how) == pytest.approx(whole, abs=1e-9)
    assert step_loss(rows, [[i] for i in range(len(rows))], how) == pytest.approx(whole, abs=1e-9)


def test_trajectory_without_a_kept_token_then_not_counted() -> None:
    assert counted_trajectories([0, 2, 1], ["a", "b", "b"]) == [False, True, False]


def test_constant_without_a_constant_then_value_error() -> None:
    with pytest.raises(ValueError, match="constant_tokens"):
        row_weights([1], ["a"], Aggregation.CONSTANT)
