"""The prefix cache: what it finds and what it forgets."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.cpu.prefix_cache import BLOCK, CachedSequence, Ids, PrefixCache, block_chain, common_length


def as_ids(numbers: list[int]) -> Ids:
    return np.asarray(numbers, dtype=np.int32)


def sequence(numbers: list[int]) -> CachedSequence:
    ids = as_ids(numbers)
    return CachedSequence(ids, block_chain(ids), torch.empty(0))


def found_length(cache: PrefixCache, numbers: list[int]) -> int:
    ids = as_ids(numbers)
    return cache.longest(ids, block_chain(ids))[1]


def counting(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def test_longest_when_sequences_part_inside_a_block_counts_to_the_token() -> None:
    cache = PrefixCache()
    cache.insert(sequence(counting(40)), 100)
    assert found_length(cache, counting(21) + [999] * 30) == 21
    assert found_length(cache, counting(200)) == 40
    assert found_length(cache, [999, *counting(60)]) == 0


def test_insert_when_a_sequence_grows_replaces_the_shorter_one() -> None:
    cache = PrefixCache()
    cache.insert(sequence(counting(40)), 200)
    assert cache.insert(sequence(counting(70)), 200)
    assert (len(cache), cache.num_tokens) == (1, 70)
    assert not cache.insert(sequence(counting(50)), 200), "it is covered"
    assert found_length(cache, counting(100)) == 70


def test_insert_when_over_budget_drops_the_least_recently_used() -> None:
    cache = PrefixCache()
    for start in (0, 1000, 2000):
        cache.insert(sequence(counting(30, start)), 90)
    assert found_length(cache, counting(30)) == 30  # used now, so the second is the oldest
    cache.insert(sequence(counting(30, 3000)), 90)
    lengths = [found_length(cache, counting(30, start)) for start in (0, 1000, 2000, 3000)]
    assert lengths == [30, 0, 30, 30]
    assert not cache.insert(sequence(counting(91, 5000)), 90)
    cache.shrink(30)
    assert cache.num_tokens == 30


def test_flush_when_called_forgets_everything() -> None:
    cache = PrefixCache()
    cache.insert(sequence(counting(40)), 100)
    cache.flush()
    assert (found_length(cache, counting(40)), cache.num_tokens, len(cache)) == (0, 0, 0)


short_ids = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=3 * BLOCK)


@given(st.lists(short_ids, min_size=1, max_size=4), short_ids)
def test_longest_when_compared_with_all_sequences_finds_the_best(
    stored: list[list[int]], asked: list[int]
) -> None:
    cache = PrefixCache()
    for numbers in stored:
        cache.insert(sequence(numbers), 1000)
    best = max(common_length(as_ids(numbers), as_ids(asked)) for numbers in stored)
    assert found_length(cache, asked) == (best if best >= BLOCK else 0)


@given(st.lists(st.integers(0, 5), max_size=100), st.integers(0, 100))
def test_block_chain_when_continued_equals_the_whole(numbers: list[int], cut: int) -> None:
    ids = as_ids(numbers)
    assert block_chain(ids, block_chain(ids[:cut])) == block_chain(ids)
