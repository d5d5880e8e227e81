"""The engine client: what it sends, what it refuses, what it makes of answers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from practicum.errors import EngineError, InvalidInput
from practicum.trajectory import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.generation import FinishReason, version_of
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = np.array([5, 6, 7], dtype=np.int32)


@dataclass
class Pair:
    engine: ScriptedEngine
    client: EngineClient

    async def generate(self, prompt: Any = PROMPT, **sampling: Any) -> Any:
        params = SamplingParams(**({"max_new_tokens": 8} | sampling))
        return await self.client.generate(
            prompt, request_id="r/", sampling=params, stop_token_ids=(2,), timeout_s=5
        )


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    engine = ScriptedEngine(lambda prompt: [10, 11, 2])
    async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as http:
        client = EngineClient(
            http, engine_id="engine-0", base_url="http://engine/", vocab_size=100, context_length=64
        )
        yield Pair(engine, client)


async def test_generate_when_called_sends_ids_and_gives_spans(pair: Pair) -> None:
    generation = await pair.generate(temperature=0.7)
    assert pair.engine.requests == [
        {
            "input_ids": [5, 6, 7],
            "rid": "r/",
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 8, "temperature": 0.7, "stop_token_ids": [2]},
        }
    ]
    assert generation.token_ids_T.tolist() == [10, 11, 2]
    assert generation.logprobs_T.tolist() == [-1.0, -1.0, -1.0]
    assert generation.finish_reason is FinishReason.STOP
    assert [(span.start, span.end, span.weight_version) for span in generation.version_spans] == [(0, 3, 0)]


async def test_generate_when_weights_changed_on_the_way_gives_a_span_each(pair: Pair) -> None:
    spans = [
        {"version": "3", "start": 0, "end": 0},
        {"version": "3", "start": 0, "end": 1},
        {"version": "4.1", "start": 1, "end": 3},
    ]
    pair.engine.change_answer = lambda answer: (
        answer | {"meta_info": answer["meta_info"] | {"weight_versions": spans}}
    )
    generation = await pair.generate()
    assert [(span.start, span.end, span.weight_version) for span in generation.version_spans] == [
        (0, 1, 3),
        (1, 3, 4),
    ]
    assert generation.labels == ("3", "4.1")


async def test_generate_when_aborted_in_the_queue_gives_no_token(pair: Pair) -> None:
    pair.engine.change_answer = lambda answer: {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }
    generation = await pair.generate()
    assert generation.finish_reason is FinishReason.ABORT
    assert len(generation.token_ids_T) == 0
    assert generation.version_spans == ()


@pytest.mark.parametrize(
    ("prompt", "field"),
    [([], "input_ids"), ([5, 100], "input_ids"), ([-1], "input_ids"), ([5] * 60, "max_new")],
)
async def test_generate_when_the_prompt_is_bad_sends_nothing(
    pair: Pair, prompt: list[int], field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        await pair.generate(np.array(prompt, dtype=np.int32))
    assert pair.engine.requests == []


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"max_new_tokens": 0},
    ],
)
async def test_generate_when_logprobs_would_not_be_the_sampled_ones_refuses(
    pair: Pair, sampling: dict[str, float]
) -> None:
    with pytest.raises(InvalidInput, match=next(iter(sampling))):
        await pair.generate(**sampling)
    assert pair.engine.requests == []


@pytest.mark.parametrize(
    "change",
    [
        {"weight_versions": [{"version": "0", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "0", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "main", "start": 0, "end": 3}]},
        {"weight_versions": None},
        {"output_token_logprobs": [[-1.0, 10, None]]},
        {"output_token_logprobs": [[-1.0, 10, None], [-1.0, 12, None], [-1.0, 2, None]]},
        {"output_token_logprobs": [[-1.0, 10, None], [None, 11, None], [-1.0, 2, None]]},
        {"output_token_logprobs": [[-1.0, 10, None], [float("nan"), 11, None], [-1.0, 2, None]]},
        {"finish_reason": None},
        {"finish_reason": {"type": "tired"}},
    ],
)
async def test_generate_when_the_answer_does_not_fit_together_fails(
    pair: Pair, change: dict[str, Any]
) -> None:
    pair.engine.change_answer = lambda answer: answer | {"meta_info": answer["meta_info"] | change}
    with pytest.raises(EngineError):
        await pair.generate()


async def test_generate_when_the_engine_is_down_fails(pair: Pair) -> None:
    pair.engine.is_up = False
    with pytest.raises(EngineError, match="engine-0"):
        await pair.generate()
    assert not await pair.client.is_healthy(timeout_s=1)


async def test_score_when_called_gives_one_logprob_a_token(pair: Pair) -> None:
    assert (await pair.client.score(PROMPT)).tolist() == [0.0, -1.0, -1.0]
    sent = pair.engine.requests[0]
    assert sent["logprob_start_len"] == 0
    assert sent["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(("sent", "told", "is_right"), [(99, 0, True), (99, 99, True), (98, 0, False)])
async def test_score_when_the_engine_names_the_last_id_0_takes_it_for_what_was_sent(
    sent: int, told: int, is_right: bool
) -> None:
    entries = [[None, 5, None], [-2.0, told, None]]
    answer = httpx.Response(200, json={"text": "", "meta_info": {"input_token_logprobs": entries}})
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer)) as http:
        client = EngineClient(http, engine_id="e", base_url="http://e/", vocab_size=100, context_length=64)
        scoring = client.score(np.array([5, sent], dtype=np.int32))
        if is_right:
            assert (await scoring).tolist() == [0.0, -2.0]
        else:
            with pytest.raises(EngineError, match="not those of the prompt"):
                await scoring


async def test_update_when_the_engine_refuses_fails_with_its_reason(pair: Pair) -> None:
    with pytest.raises(EngineError, match="cannot read"):
        await pair.client.update_weights("/nowhere", "3", timeout_s=5)
    assert await pair.client.served_weights() == ("default", "/models/base")


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("0", 0), ("12", 12), ("12.3", 12)])
def test_version_when_the_label_is_ours_is_read(label: str, version: int) -> None:
    assert version_of(label) == version


@pytest.mark.parametrize("label", ["", "main", "v3", "-1", "1e3"])
def test_version_when_the_label_is_not_ours_is_refused(label: str) -> None:
    with pytest.raises(EngineError):
        version_of(label)
