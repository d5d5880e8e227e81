"""The engines as the policy of an episode."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from practicum.clock import SystemClock
from practicum.errors import EngineError
from practicum.trajectory import SamplingParams
from services.rollout.engine.generation import FinishReason
from services.rollout.engine.labels import LabelBook
from services.rollout.engine.pool import EnginePool
from services.rollout.engine.records import Load, Serving
from services.rollout.episode.policy import EnginePolicy
from tests.fixtures.chat_models import build_chat
from tests.fixtures.scripted_engine import ScriptedEngine, make_engine

WHOLE = [10, 11, 12, 13, 14, 15, 2]
PROMPT = np.array([5, 6], dtype=np.int32)


class GivesBack(ScriptedEngine):
    """Gives a request back unfinished a number of times, some tokens further each time."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(lambda prompt: WHOLE[len(prompt) - len(PROMPT) :])
        self.sizes = list(sizes)
        self.change_answer = self.cut

    def cut(self, answer: dict[str, Any]) -> dict[str, Any]:
        if not self.sizes:
            return answer
        size = self.sizes.pop(0)
        self.label = str(int(self.label.replace("default", "0")) + 1)
        meta = answer["meta_info"]
        span = meta["weight_versions"][0] | {"end": size}
        return {
            "output_ids": answer["output_ids"][:size],
            "meta_info": meta
            | {
                "finish_reason": {"type": "abort"},
                "output_token_logprobs": meta["output_token_logprobs"][:size],
                "weight_versions": [span] if size else [],
            },
        }


async def generate(engine: ScriptedEngine, max_new_tokens: int = 20) -> Any:
    async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as client:
        made = make_engine(client, 0, build_chat(), num_slots=2, clock=SystemClock())
        made.gate.is_open = True
        for version, label in enumerate(("default", "1", "2")):
            made.keeps(label, Serving(run_id="", weight_version=version, path=f"/models/v{version}"))

        async def find(label: str) -> Load | None:
            return None

        policy = EnginePolicy(
            EnginePool([made], labels=LabelBook(find, clock=SystemClock()), clock=SystemClock()),
            run_id="",
            affinity="g",
            sampling=SamplingParams(max_new_tokens=4),
            stop_token_ids=(2,),
            timeout_s=5,
        )
        return await policy.generate(PROMPT, request_id="t/0/", max_new_tokens=max_new_tokens)


async def test_turn_when_given_back_unfinished_is_continued_with_its_tokens() -> None:
    engine = GivesBack(3, 0)
    generation = await generate(engine)
    assert generation.token_ids_T.tolist() == WHOLE
    assert generation.finish_reason is FinishReason.STOP
    assert [request["input_ids"] for request in engine.requests] == [
        [5, 6],
        [5, 6, 10, 11, 12],
        [5, 6, 10, 11, 12],
    ]
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [20, 17, 17]
    assert len({request["rid"] for request in engine.requests}) == 3
    spans = [(span.start, span.end, span.weight_version) for span in generation.version_spans]
    assert spans == [(0, 3, 0), (3, 7, 2)]


async def test_turn_when_given_back_at_its_limit_is_cut() -> None:
    generation = await generate(GivesBack(3), max_new_tokens=3)
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.token_ids_T.tolist() == WHOLE[:3]


async def test_turn_when_given_back_without_end_is_the_platforms_failure() -> None:
    with pytest.raises(EngineError, match="aborted"):
        await asyncio.wait_for(generate(GivesBack(0, 0, 0, 0, 0, 0)), timeout=5)
