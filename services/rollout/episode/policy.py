"""Who writes a turn: the engines, or a script for demonstrations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from practicum.errors import EngineError
from practicum.trajectory import Ids, SamplingParams, VersionSpan
from services.rollout.engine.generation import FinishReason, Generation
from services.rollout.engine.pool import EnginePool

DEMONSTRATION_ENGINE = "demonstration"
_MAX_PARTS = 4  # times a turn is taken up again after an engine gave it back unfinished


class Policy(Protocol):
    """Writes the turns of one episode."""

    async def generate(self, prompt_ids_T: Ids, *, request_id: str, max_new_tokens: int) -> Generation:
        """The next turn. Raises `EngineError` where the platform failed.

        `request_id` is no beginning of any other request's id.
        """
        ...


class EnginePolicy:
    """The engines as the policy of one episode."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        run_id: str,
        affinity: str,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._run_id = run_id
        self._affinity = affinity
        self._sampling = sampling
        self._stop_token_ids = tuple(stop_token_ids)
        self._timeout_s = timeout_s

    async def generate(self, prompt_ids_T: Ids, *, request_id: str, max_new_tokens: int) -> Generation:
        """One turn; a turn that an engine gave back unfinished is continued with the tokens it has."""
        parts: list[Generation] = []
        num_left = max_new_tokens
        while len(parts) < _MAX_PARTS:
            part = await self._pool.generate(
                np.concatenate([prompt_ids_T, *(done.token_ids_T for done in parts)]),
                request_id=f"{request_id}{len(parts)}/",
                run_id=self._run_id,
                affinity=self._affinity,
                sampling=replace(self._sampling, max_new_tokens=num_left),
                stop_token_ids=self._stop_token_ids,
                timeout_s=self._timeout_s,
            )
            parts.append(part)
            num_left -= len(part.token_ids_T)
            if part.finish_reason is not FinishReason.ABORT:
                return _joined(parts, request_id)
            if num_left == 0:
                return replace(_joined(parts, request_id), finish_reason=FinishReason.LENGTH)
        raise EngineError(f"the turn was aborted {_MAX_PARTS} times")


class ScriptedPolicy:
    """Writes the turns it was given, for demonstrations and tests; logprob 0, version 0."""

    def __init__(self, turns: Sequence[Ids]) -> None:
        self._turns = tuple(turns)
        self._next = 0

    async def generate(self, prompt_ids_T: Ids, *, request_id: str, max_new_tokens: int) -> Generation:
        """The next turn of the script, cut where it passes `max_new_tokens`."""
        if self._next == len(self._turns):
            raise ValueError(f"the script has {len(self._turns)} turns; another was asked for")
        whole_T = self._turns[self._next]
        self._next += 1
        ids_T = whole_T[:max_new_tokens]
        span = VersionSpan(start=0, end=len(ids_T), weight_version=0, engine_id=DEMONSTRATION_ENGINE)
        return Generation(
            request_id=request_id,
            token_ids_T=ids_T,
            logprobs_T=np.zeros(len(ids_T), dtype=np.float32),
            version_spans=(span,) if len(ids_T) else (),
            finish_reason=FinishReason.STOP if len(ids_T) == len(whole_T) else FinishReason.LENGTH,
        )


def _joined(parts: Sequence[Generation], request_id: str) -> Generation:
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        spans += [
            replace(span, start=span.start + offset, end=span.end + offset) for span in part.version_spans
        ]
        offset += len(part.token_ids_T)
    return Generation(
        request_id=request_id,
        token_ids_T=np.concatenate([part.token_ids_T for part in parts]),
        logprobs_T=np.concatenate([part.logprobs_T for part in parts]),
        version_spans=tuple(spans),
        finish_reason=parts[-1].finish_reason,
        labels=tuple(label for part in parts for label in part.labels),
        generation_s=sum(part.generation_s for part in parts),
        waiting_s=sum(part.waiting_s for part in parts),
    )
