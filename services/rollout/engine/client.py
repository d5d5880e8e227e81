"""One engine over SGLang's native HTTP API.

Owns the JSON of that API and its limits: ids are checked before they are sent, since an id outside the
vocabulary ends a SGLang server; request keys are exactly those the API knows, since it drops unknown
ones in silence; an answer whose ids, logprobs and version spans do not fit together is an `EngineError`.
Never routes, retries or counts.

The engine's logprobs are those of the sampling distribution for any temperature as long as no nucleus or
top-k bound cuts it (they are not renormalised over the kept tokens), so such bounds are refused here.
Prompt logprobs are always at temperature 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from practicum.errors import EngineError, InvalidInput
from practicum.trajectory import Floats, Ids, SamplingParams, VersionSpan
from services.rollout.engine.generation import FinishReason, Generation, version_of

_CONTROL_TIMEOUT_S = 10.0


class EngineUnreachable(EngineError):
    """Nobody answers at the engine's address, or the connection broke: it is gone, not wrong or slow."""


class EngineClient:
    """Calls one engine. `engine_id` names it in version spans and logs."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        engine_id: str,
        base_url: str,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self.engine_id = engine_id
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._http = http

    async def generate(
        self,
        prompt_ids_T: Ids,
        *,
        request_id: str,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Generation:
        """Sample one turn. Raises `InvalidInput` for bad ids or bounds, `EngineError` for the rest.

        `EngineUnreachable` among them: no token of this request came back, so it may be sent again.
        """
        refuse_cut_distribution(sampling)
        self._check_ids(prompt_ids_T)
        if len(prompt_ids_T) + sampling.max_new_tokens > self.context_length:
            raise InvalidInput(
                "max_new_tokens",
                f"{len(prompt_ids_T)} prompt tokens and {sampling.max_new_tokens} new ones pass the "
                f"engine's context of {self.context_length}",
            )
        body = {
            "input_ids": prompt_ids_T.tolist(),
            "rid": request_id,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "stop_token_ids": list(stop_token_ids),
            },
        }
        answer = await self._post("/generate", body, timeout_s=timeout_s)
        return _parse_generation(answer, request_id=request_id, engine_id=self.engine_id)

    async def score(self, token_ids_T: Ids, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> Floats:
        """Logprob of each token given those before it, temperature 1; 0 for the first."""
        self._check_ids(token_ids_T)
        sent: list[int] = token_ids_T.tolist()
        body = {
            "input_ids": sent,
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        answer = await self._post("/generate", body, timeout_s=timeout_s)
        entries = _meta(answer).get("input_token_logprobs")
        entries = entries if isinstance(entries, list) else []
        told = [entry[1] for entry in entries]
        if len(told) != len(sent) or not all(map(self._is_named, sent, told)):
            raise EngineError("the prompt logprobs are not those of the prompt that was sent")
        return np.array([0.0, *(_number(entry[0]) for entry in entries[1:])], dtype=np.float32)

    def _is_named(self, sent: int, told: int) -> bool:
        """Whether the engine's name for a prompt's id is right.

        SGLang 0.5.23 names the last id of a vocabulary 0 here; the logprob beside it is that of the id.
        """
        return told == sent or (told == 0 and sent == self.vocab_size - 1)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its generate call returns what it has. SGLang matches ids by their beginning."""
        await self._send("POST", "/abort_request", {"rid": request_id}, timeout_s=_CONTROL_TIMEOUT_S)

    async def pause(self) -> None:
        """Hold generation; running requests go back to the queue and keep their tokens."""
        await self._post("/pause_generation", {"mode": "retract"}, timeout_s=_CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._post("/continue_generation", {}, timeout_s=_CONTROL_TIMEOUT_S)

    async def update_weights(self, path: str, label: str, *, timeout_s: float) -> None:
        """Load a Hugging Face folder and drop every cached prefix; `EngineError` says what went wrong."""
        body = {"model_path": path, "weight_version": label, "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body, timeout_s=timeout_s)
        if answer.get("success") is not True:
            raise EngineError(f"the engine refused {path}: {answer.get('message', 'no reason given')}")

    async def served_weights(self) -> tuple[str, str]:
        """(label, folder) of the weights the engine holds."""
        response = await self._send("GET", "/model_info", None, timeout_s=_CONTROL_TIMEOUT_S)
        answer = _json(response, "/model_info")
        return str(answer.get("weight_version") or ""), str(answer.get("model_path") or "")

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """True where the engine says that it can generate."""
        try:
            response = await self._http.get(f"{self.base_url}/health", timeout=timeout_s)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    def _check_ids(self, token_ids_T: Ids) -> None:
        if len(token_ids_T) == 0:
            raise InvalidInput("input_ids", "a prompt needs at least one token")
        lowest, highest = int(token_ids_T.min()), int(token_ids_T.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise InvalidInput("input_ids", f"ids must lie in [0, {self.vocab_size}): {lowest}..{highest}")

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        return _json(await self._send("POST", path, body, timeout_s=timeout_s), path)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> httpx.Response:
        try:
            response = await self._http.request(method, self.base_url + path, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self.engine_id} {path}: no answer in {timeout_s} s") from error
        except httpx.NetworkError as error:
            raise EngineUnreachable(f"{self.engine_id} {path}: {type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self.engine_id} {path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(f"{self.engine_id} {path}: HTTP {response.status_code}: {response.text[:500]}")
        return response


def refuse_cut_distribution(sampling: SamplingParams) -> None:
    """Raise `InvalidInput` where the engine's logprobs would not be those of the sampling distribution."""
    if sampling.top_p != 1.0:
        raise InvalidInput("top_p", "must be 1: logprobs under a nucleus bound are not renormalised")
    if sampling.top_k != -1:
        raise InvalidInput("top_k", "must be -1: logprobs under a top-k bound are not renormalised")
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise InvalidInput("temperature", "must be a number from 0")
    if sampling.max_new_tokens < 1:
        raise InvalidInput("max_new_tokens", "must be at least 1")


def _json(response: httpx.Response, path: str) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError as error:
        raise EngineError(f"{path}: the answer is no JSON") from error
    if not isinstance(answer, dict):
        raise EngineError(f"{path}: the answer is no JSON object")
    return answer


def _meta(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError("/generate: the answer has no meta_info")
    return meta


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineError(f"/generate: {value!r} is no logprob")
    return float(value)


def _parse_generation(answer: Mapping[str, Any], *, request_id: str, engine_id: str) -> Generation:
    meta = _meta(answer)
    token_ids = answer.get("output_ids") or []
    entries = meta.get("output_token_logprobs") or []
    if [entry[1] for entry in entries] != token_ids:
        raise EngineError(f"/generate: {len(token_ids)} ids and {len(entries)} logprobs do not match")
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in list(FinishReason):
        raise EngineError(f"/generate: unknown finish reason {reason!r}")
    spans, labels = _parse_spans(meta, len(token_ids), engine_id)
    # Rounding in the engine can leave a certain token a hair above 0.
    logprobs_T = np.minimum(np.array([_number(entry[0]) for entry in entries], dtype=np.float32), 0.0)
    return Generation(
        request_id=request_id,
        token_ids_T=np.array(token_ids, dtype=np.int32),
        logprobs_T=logprobs_T,
        version_spans=spans,
        finish_reason=FinishReason(reason["type"]),
        labels=labels,
    )


def _parse_spans(
    meta: Mapping[str, Any], num_tokens: int, engine_id: str
) -> tuple[tuple[VersionSpan, ...], tuple[str, ...]]:
    if num_tokens == 0:  # a request aborted in the queue has no spans
        return (), ()
    raw = meta.get("weight_versions")
    if not isinstance(raw, list):
        raise EngineError("/generate: the answer has no weight_versions")
    spans = []
    labels = []
    position = 0
    for item in raw:
        start, end, label = int(item["start"]), int(item["end"]), str(item["version"])
        if start != position or end < start:
            raise EngineError(f"/generate: version span [{start}, {end}) does not continue at {position}")
        position = end
        if end > start:
            version = version_of(label)
            spans.append(VersionSpan(start=start, end=end, weight_version=version, engine_id=engine_id))
            labels.append(label)
    if position != num_tokens:
        raise EngineError(f"/generate: version spans cover {position} of {num_tokens} tokens")
    return tuple(spans), tuple(labels)
