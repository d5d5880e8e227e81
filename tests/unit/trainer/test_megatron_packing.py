"""Packing: every row comes back whole, shared prefixes are packed once, bounds hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.trainer.megatron.packing import Microbatch, pack

Ids = NDArray[np.int32]


def rows_of(lengths: list[int], *, seed: int = 0, prefix: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 50, prefix)
    return [np.concatenate([start, rng.integers(0, 50, n)]).astype(np.int32) for n in lengths]


def assert_whole(rows: list[Ids], microbatches: list[Microbatch], bound: int) -> None:
    seen = sorted(index for microbatch in microbatches for index in microbatch.row_indices)
    assert seen == list(range(len(rows)))
    for microbatch in microbatches:
        assert microbatch.num_packed <= bound
        places = zip(microbatch.row_indices, microbatch.packed_index_by_row, strict=True)
        for row, packed_index_T in places:
            assert microbatch.ids_N[packed_index_T].tolist() == rows[row].tolist()
            assert microbatch.positions_N[packed_index_T].tolist() == list(range(rows[row].size))
        sizes = [segment.num_tokens for segment in microbatch.segments]
        assert sum(sizes) == microbatch.num_packed
        assert min(sizes) > 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=14),
    st.integers(100, 300),
)
def test_pack_for_any_rows_then_each_is_whole_and_bounds_hold(
    rows: list[tuple[int, int, int]], bound: int
) -> None:
    # A row takes the first `shared` tokens of one of three texts, then tokens that repeat often.
    texts = [np.random.default_rng(seed).integers(0, 50, 40) for seed in range(3)]
    ids_by_row = [
        np.concatenate([texts[text][:shared], np.arange(own) % 3]).astype(np.int32)
        for text, shared, own in rows
    ]
    assert_whole(ids_by_row, pack(ids_by_row, bound), bound)


def test_pack_when_rows_share_a_prefix_then_it_is_packed_once() -> None:
    rows = rows_of([30, 30, 30], prefix=100)
    (microbatch,) = pack(rows, 1000)
    assert microbatch.num_packed == 100 + 3 * 30
    assert sorted(len(segment.path) for segment in microbatch.segments) == [0, 1, 1, 1]


def test_pack_when_rows_are_equal_then_packed_once() -> None:
    (row,) = rows_of([50])
    (microbatch,) = pack([row, row], 1000)
    assert microbatch.num_packed == 50
    assert_whole([row, row], [microbatch], 1000)


def test_pack_when_prefix_is_short_then_not_shared() -> None:
    (microbatch,) = pack(rows_of([30, 30], prefix=4), 1000)
    assert microbatch.num_packed == 68


def test_pack_when_rows_pass_the_bound_together_then_microbatches_of_like_cost() -> None:
    rows = rows_of([50] * 16)
    microbatches = pack(rows, 210)
    assert_whole(rows, microbatches, 210)
    assert [microbatch.num_packed for microbatch in microbatches] == [200] * 4


def test_pack_when_costs_are_very_uneven_then_still_within_the_bound() -> None:
    rows = rows_of([100, 1, 100, 1, 100, 99, 2])
    assert_whole(rows, pack(rows, 100), 100)


def test_pack_when_a_row_is_longer_than_the_bound_then_value_error() -> None:
    with pytest.raises(ValueError, match="row 1 has 60 tokens, more than microbatch_tokens 50"):
        pack(rows_of([10, 60]), 50)
