"""The rows of an episode under construction."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import EngineError
from practicum.trajectory import MaskReason, VersionSpan
from services.rollout.ledger import Ledger

VOCAB = 50


def span(start: int, end: int, version: int = 0, engine: str = "e0") -> VersionSpan:
    return VersionSpan(start=start, end=end, weight_version=version, engine_id=engine)


def opened(*prompt: int) -> Ledger:
    ledger = Ledger(vocab_size=VOCAB)
    ledger.open(list(prompt))
    return ledger


_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("sample"), _IDS, st.integers(0, 3)),
        st.tuples(st.just("tool"), _IDS, st.just(0)),
        st.tuples(st.just("extend"), _IDS, st.just(0)),
        st.tuples(
            st.just("replace"), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), st.just(0)
        ),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=200)
@given(steps=_STEPS)
def test_rows_of_any_episode_hold_and_train_every_sampled_token_once(
    steps: list[tuple[str, list[int], int]],
) -> None:
    ledger = opened(1, 2)
    sampled: list[tuple[int, int]] = []
    for kind, ids, version in steps:
        if kind == "sample":
            ledger.append_sampled(ids, [-0.25] * len(ids), [span(0, len(ids), version)] if ids else [])
            sampled += [(token_id, version) for token_id in ids]
        elif kind == "tool":
            ledger.append_context(ids, MaskReason.TOOL)
        elif kind == "extend":
            assert ledger.replace_prompt([*ledger.prompt_ids().tolist(), *ids]) is None
        else:
            ledger.replace_prompt(ids)
    rows = ledger.rows()
    trained = [
        (int(token_id), int(version))
        for row in rows
        for token_id, version in zip(
            row.token_ids_T[row.mask_T()], row.versions_T()[row.mask_T()], strict=True
        )
    ]
    assert trained == sampled
    assert ledger.num_sampled_tokens == len(sampled)
    assert len(rows) >= 1


def test_replace_prompt_that_extends_the_row_adds_context_only() -> None:
    ledger = opened(1, 2)
    ledger.append_sampled([3], [-0.5], [span(0, 1)])
    assert ledger.replace_prompt([1, 2, 3, 4, 5]) is None
    (row,) = ledger.rows()
    assert row.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert row.mask_T().tolist() == [False, False, True, False, False]
    assert ledger.prefix_breaks == ()


def test_replace_prompt_that_is_shorter_than_the_row_opens_a_new_one() -> None:
    ledger = opened(1, 2)
    ledger.append_sampled([3], [-0.5], [span(0, 1)])
    assert ledger.replace_prompt([1, 2]) == 2
    assert ledger.prompt_ids().tolist() == [1, 2]


def test_rows_leave_out_prompts_that_nothing_followed() -> None:
    ledger = opened(1, 2)
    ledger.append_sampled([3], [-0.5], [span(0, 1)])
    ledger.replace_prompt([7, 8])
    (row,) = ledger.rows()
    assert row.token_ids_T.tolist() == [1, 2, 3]
    empty = opened(1, 2)
    assert [row.token_ids_T.tolist() for row in empty.rows()] == [[1, 2]]


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans"),
    [
        ([3, 4], [-0.5], [span(0, 2)]),
        ([3, 4], [-0.5, float("nan")], [span(0, 2)]),
        ([3, 4], [-0.5, float("-inf")], [span(0, 2)]),
        ([3, 4], [-0.5, 0.1], [span(0, 2)]),
        ([3, VOCAB], [-0.5, -0.5], [span(0, 2)]),
        ([3, -1], [-0.5, -0.5], [span(0, 2)]),
        ([3, 2**40], [-0.5, -0.5], [span(0, 2)]),
        ([3, 4.5], [-0.5, -0.5], [span(0, 2)]),
        ([[3, 4]], [[-0.5, -0.5]], [span(0, 2)]),
        ([3, 4], [-0.5, None], [span(0, 2)]),
        ([3, 4], ["x", "y"], [span(0, 2)]),
        ([3, 4], [-0.5, -0.5], []),
        ([3, 4], [-0.5, -0.5], [span(0, 1)]),
        ([3, 4], [-0.5, -0.5], [span(0, 3)]),
        ([3, 4], [-0.5, -0.5], [span(0, 1), span(0, 2)]),
        ([3, 4], [-0.5, -0.5], [span(0, 0), span(0, 2)]),
        ([3, 4], [-0.5, -0.5], [span(0, 2, version=-1)]),
        ([], [], [span(0, 1)]),
    ],
)
def test_append_sampled_of_a_broken_answer_is_an_engine_error_and_changes_nothing(
    ids: list[int], logprobs: list[float], spans: list[VersionSpan]
) -> None:
    ledger = opened(1, 2)
    with pytest.raises(EngineError):
        ledger.append_sampled(ids, logprobs, spans)
    assert ledger.prompt_ids().tolist() == [1, 2]
    assert ledger.num_sampled_tokens == 0


def test_append_sampled_accepts_a_certain_token_with_rounding() -> None:
    ledger = opened(1)
    ledger.append_sampled([3], [1e-7], [span(0, 1)])
    assert ledger.rows()[0].mask_T().tolist() == [False, True]


@pytest.mark.parametrize("ids", [[VOCAB], [-1], [0.5], [2**33]])
def test_context_out_of_the_vocabulary_is_refused_before_it_is_sent(ids: list[int]) -> None:
    ledger = opened(1)
    with pytest.raises(ValueError, match="token id"):
        ledger.append_context(ids, MaskReason.TOOL)
    with pytest.raises(ValueError, match="token id"):
        Ledger(vocab_size=VOCAB).open(ids)
    assert ledger.num_tokens == 1


def test_context_is_never_given_a_sampled_reason() -> None:
    for reason in (MaskReason.MODEL, MaskReason.EXPIRED):
        with pytest.raises(ValueError, match="no reason for context"):
            opened(1).append_context([2], reason)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Ledger(vocab_size=VOCAB).open([])


def test_spans_of_one_source_are_joined_and_of_two_are_kept() -> None:
    ledger = opened(1)
    for version, engine in ((1, "a"), (1, "a"), (1, "b"), (2, "b")):
        ledger.append_sampled([3, 4], [-0.5, -0.5], [span(0, 2, version, engine)])
    (row,) = ledger.rows()
    assert [(s.start, s.end, s.weight_version, s.engine_id) for s in row.version_spans] == [
        (1, 5, 1, "a"),
        (5, 7, 1, "b"),
        (7, 9, 2, "b"),
    ]
    assert len(row.mask_spans) == 2


def test_prompt_ids_is_a_read_only_view_that_later_appends_leave_true() -> None:
    ledger = opened(*range(10))
    before = ledger.prompt_ids()
    assert before.dtype == np.int32
    assert np.shares_memory(before, ledger.prompt_ids())
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 5
    ledger.append_context(np.full(5000, 7, dtype=np.int32), MaskReason.TOOL)
    assert before.tolist() == list(range(10))
    assert ledger.num_tokens == 5010


def test_rows_are_values_of_their_own() -> None:
    ledger = opened(1)
    (row,) = ledger.rows()
    ledger.append_context([2], MaskReason.TOOL)
    assert row.token_ids_T.tolist() == [1]
    assert ledger.last_id == 2


def test_appending_to_a_long_row_costs_the_new_tokens_only() -> None:
    def seconds(length: int) -> float:
        ledger = opened(1)
        ledger.append_context(np.zeros(length, dtype=np.int32), MaskReason.TOOL)
        ledger.append_context(np.zeros(length, dtype=np.int32), MaskReason.TOOL)  # room to grow into
        new = np.ones(8, dtype=np.int32)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(200):
                ledger.append_context(new, MaskReason.TOOL)
                ledger.prompt_ids()
            best = min(best, time.perf_counter() - started)
        return best

    # A copy of four million ids a turn would take thousands of times as long as the append.
    assert seconds(4_000_000) < 20 * seconds(1_000)
