"""Sampling parameters and the batch sampler."""

from typing import Any

import pytest
import torch

from engines.cpu.sampling import SamplingParams, SamplingPlan, parse_sampling_params, sample

PROBABILITIES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])


def draw(
    params: list[SamplingParams],
    *,
    logits: torch.Tensor | None = None,
    forbidden: list[tuple[int, list[int]]] | None = None,
    counts: list[int] | None = None,
    seed: int = 0,
) -> tuple[list[int], list[float]]:
    rows = PROBABILITIES.log().repeat(len(params), 1) if logits is None else logits
    ids, logprobs = sample(
        rows.clone(),
        SamplingPlan.of(params),
        forbidden or [],
        counts or [0] * len(params),
        torch.Generator().manual_seed(seed),
    )
    return ids.tolist(), logprobs.tolist()


def frequencies(params: SamplingParams, count: int = 20_000) -> list[float]:
    ids, _ = draw([params] * count)
    return [ids.count(token) / count for token in range(5)]


def test_sample_when_plain_follows_the_distribution() -> None:
    assert frequencies(SamplingParams()) == pytest.approx(PROBABILITIES.tolist(), abs=0.012)


def test_sample_when_heated_follows_the_flattened_distribution() -> None:
    flat = PROBABILITIES.sqrt() / PROBABILITIES.sqrt().sum()
    assert frequencies(SamplingParams(temperature=2.0)) == pytest.approx(flat.tolist(), abs=0.012)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_k=2), [2 / 3, 1 / 3, 0, 0, 0]),
        (SamplingParams(top_p=0.6), [2 / 3, 1 / 3, 0, 0, 0]),
        (SamplingParams(top_p=0.01), [1, 0, 0, 0, 0]),
        (SamplingParams(min_p=0.2), [4 / 7, 2 / 7, 1 / 7, 0, 0]),
        (SamplingParams(top_k=2, top_p=0.6), [1, 0, 0, 0, 0]),
    ],
)
def test_sample_when_narrowed_draws_from_the_kept_tokens_only(
    params: SamplingParams, expected: list[float]
) -> None:
    assert frequencies(params) == pytest.approx(expected, abs=0.012)


def test_sample_when_narrowed_gives_logprobs_of_the_whole_distribution() -> None:
    ids, logprobs = draw([SamplingParams(top_k=1)])
    assert ids == [0]
    assert logprobs == pytest.approx([PROBABILITIES[0].log().item()])


def test_sample_when_rows_differ_treats_each_by_its_own_parameters() -> None:
    rows = [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(temperature=4.0)]
    ids, logprobs = draw(rows, forbidden=[(0, [0])], seed=3)
    assert ids[:2] == [1, 0]
    assert logprobs[0] == pytest.approx(torch.tensor(0.5).log().item())  # 0.25 of the 0.5 that is left
    assert logprobs[1] == pytest.approx(torch.tensor(0.5).log().item())
    hot = torch.log_softmax(PROBABILITIES.log() / 4, -1)
    assert logprobs[2] == pytest.approx(hot[ids[2]].item(), abs=1e-6)


def test_sample_when_ids_are_forbidden_never_draws_them() -> None:
    ids, _ = draw([SamplingParams()] * 2000, forbidden=[(row, [0, 4]) for row in range(2000)])
    assert set(ids) == {1, 2, 3}


def test_sample_when_seeded_depends_on_seed_and_count_only() -> None:
    seeded = SamplingParams(sampling_seed=5, temperature=3.0)
    runs = [draw([seeded] * 40, counts=list(range(40)), seed=generator)[0] for generator in (1, 2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 2, "the count changes nothing"
    other = SamplingParams(sampling_seed=6, temperature=3.0)
    assert draw([other] * 40, counts=list(range(40)))[0] != runs[0]


def test_sample_when_logits_are_not_finite_says_nan_for_that_row_only() -> None:
    logits = torch.stack((PROBABILITIES.log(), torch.full((5,), float("nan"))))
    ids, logprobs = draw([SamplingParams(), SamplingParams()], logits=logits)
    assert 0 <= ids[1] < 5
    assert logprobs[0] == logprobs[0]
    assert logprobs[1] != logprobs[1]


def test_parse_when_everything_is_given_reads_it() -> None:
    raw = {"max_new_tokens": 7, "temperature": 0, "stop": "x", "stop_token_ids": [4], "n": 1, "regex": None}
    params = parse_sampling_params(raw, 10)
    assert (params.max_new_tokens, params.temperature, params.stop) == (7, 0.0, ("x",))
    assert params.stop_token_ids == {4}


@pytest.mark.parametrize(
    "raw",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": "four"},
        {"max_new_tokens": True},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": 2},
        {"stop": [""]},
        {"stop_token_ids": 4},
        {"stop_token_ids": [10]},
        {"min_new_tokens": 129},
        {"ignore_eos": "yes"},
        {"sampling_seed": "a"},
        {"presence_penalty": 0.1},
        {"logit_bias": {"2": 1.0}},
        {"nonsense": None},
    ],
)
def test_parse_when_a_value_is_wrong_names_the_key(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(raw))):
        parse_sampling_params(raw, 10)
