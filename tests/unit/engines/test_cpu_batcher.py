"""The batcher in one process: batches of every shape, tight memory, failures in a step."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.cpu.batcher import Batcher, EngineStopped
from engines.cpu.config import read_config
from engines.cpu.model import Model
from engines.cpu.request import AbortMessage, FinishKind, Request, VersionSpan
from engines.cpu.sampling import SamplingParams
from engines.cpu.weights import load_weights
from tests.fixtures.engine_models import EOS_ID, Reference, llama_config, save_random_model

WAIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), llama_config(), with_tokenizer=False)


class SpoilingModel(Model):
    """A model whose next decodes call `spoil` on the logits first."""

    spoil: Callable[[torch.Tensor], None] | None = None

    def decode(self, *arguments: Any) -> torch.Tensor:
        logits = super().decode(*arguments)
        if self.spoil is not None:
            self.spoil(logits)
        return logits


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[tuple[Batcher, SpoilingModel]]:
    config = read_config(folder)
    model = SpoilingModel(config, load_weights(folder, config, torch.float32), torch.float32)
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "version": "0",
        "max_running": 8,
        "max_total_tokens": 8192,
        "decode_text": lambda ids: "",
        "seed": 0,
    }
    batcher = Batcher(model, **(settings | options))
    batcher.start()
    try:
        yield batcher, model
    finally:
        batcher.stop()


def make_request(ids: list[int], max_new_tokens: int = 8, **options: Any) -> Request:
    settings: dict[str, Any] = {
        "rid": "r",
        "params": SamplingParams(ignore_eos=True),
        "eos_ids": frozenset((EOS_ID,)),
        "logprob_start": None,
    }
    return Request(prompt_ids=ids, max_new_tokens=max_new_tokens, **(settings | options))


def check(request: Request, reference: Reference) -> None:
    ids = request.prompt_ids.tolist()
    expected = reference.logprobs(ids + request.output_ids, len(ids))
    assert request.output_logprobs == pytest.approx(expected, abs=1e-4)
    if request.logprob_start is not None:
        expected = reference.logprobs(ids, request.logprob_start + 1)
        assert request.prompt_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_total_tokens", [8192, 1300], ids=["roomy", "tight"])
def test_batcher_when_requests_of_every_shape_mix_gives_each_its_own_logprobs(
    folder: Path, max_total_tokens: int
) -> None:
    rng = random.Random(1)
    stem = [rng.randrange(3, 260) for _ in range(400)]
    requests = []
    for index in range(60):
        shared = rng.choice([0, 30, 64, 200, 400])
        own = [rng.randrange(3, 260) for _ in range(rng.choice([1, 2, 20, 250, 600]))]
        start = rng.choice([None, None, 0, 10])
        requests.append(
            make_request(stem[:shared] + own, rng.randrange(1, 30), rid=str(index), logprob_start=start)
        )
        if requests[-1].logprob_start is not None and requests[-1].logprob_start >= len(
            requests[-1].prompt_ids
        ):
            requests[-1].logprob_start = None
    with running(folder, max_total_tokens=max_total_tokens) as (batcher, _):
        for request in requests:
            batcher.submit(request)
        for request in requests:
            request.future.result(WAIT_S)
        assert batcher.num_cached_tokens <= max_total_tokens
        assert batcher.counters.failures == 0
        cached_tokens = batcher.counters.cached_tokens
    assert cached_tokens > 0
    reference = Reference(folder)
    for request in requests:
        assert len(request.output_ids) == request.max_new_tokens
        check(request, reference)


def test_batcher_when_a_group_arrives_together_prefills_its_prompt_once(folder: Path) -> None:
    prompt = [5 + index % 200 for index in range(300)]
    group = [make_request(prompt, rid=str(index)) for index in range(8)]
    with running(folder) as (batcher, _):
        for request in group:
            batcher.submit(request)
        for request in group:
            request.future.result(WAIT_S)
        assert batcher.counters.prefill_tokens == len(prompt)
    assert [request.cached_tokens for request in group] == [0] + [len(prompt) - 1] * 7
    assert len({tuple(request.output_ids) for request in group}) == 8, "samples of a group differ"


def test_batcher_when_a_step_fails_fails_its_requests_and_serves_the_next(folder: Path) -> None:
    def fail(logits: torch.Tensor) -> None:
        raise RuntimeError("out of luck")

    with running(folder) as (batcher, model):
        model.spoil = fail
        unlucky = make_request([5, 6, 7])
        batcher.submit(unlucky)
        with pytest.raises(RuntimeError, match="failed in a step"):
            unlucky.future.result(WAIT_S)
        model.spoil = None
        lucky = make_request([5, 6, 7])
        batcher.submit(lucky)
        check(lucky.future.result(WAIT_S), Reference(folder))
        assert batcher.counters.failures == 1


def test_batcher_when_logits_are_not_finite_aborts_that_request_only(folder: Path) -> None:
    def spoil_first(logits: torch.Tensor) -> None:
        logits[0] = float("nan")

    with running(folder) as (batcher, model):
        model.spoil = spoil_first
        requests = [make_request([5, 6, 7 + index], 2, rid=str(index)) for index in range(2)]
        for request in requests:
            batcher.submit(request)
        results = [request.future.result(WAIT_S) for request in requests]
        model.spoil = None
    aborted = [request for request in results if request.finish and request.finish.kind is FinishKind.ABORT]
    assert aborted
    for request in aborted:
        assert request.finish is not None
        assert request.finish.message is AbortMessage.NOT_FINITE
        assert all(logprob == logprob for logprob in request.output_logprobs)


def test_batcher_when_stopped_answers_everything_and_refuses_more(folder: Path) -> None:
    with running(folder, max_running=1) as (batcher, _):
        requests = [make_request([5, 6], 1900, rid=str(index)) for index in range(3)]
        for request in requests:
            batcher.submit(request)
        batcher.stop()
        for request in requests:
            finish = request.future.result(WAIT_S).finish
            assert finish is not None
            assert finish.kind is FinishKind.ABORT
        with pytest.raises(EngineStopped):
            batcher.submit(make_request([5]))


def test_version_spans_when_versions_come_without_tokens_have_no_empty_spans() -> None:
    request = make_request([1, 2])
    request.enter_version("a")
    request.enter_version("b")
    request.output_ids += [7, 8]
    request.enter_version("c")
    request.enter_version("b")
    request.output_ids += [9]
    request.enter_version("d")
    request.finished_version = "d"
    assert request.version_spans() == [VersionSpan(version="b", start=0, end=3)]


def test_version_spans_when_nothing_was_sampled_say_one_empty_span() -> None:
    request = make_request([1, 2])
    request.finished_version = "z"
    assert request.version_spans() == [VersionSpan(version="z", start=0, end=0)]
