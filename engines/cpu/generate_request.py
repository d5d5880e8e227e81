"""Reading the body of /generate.

Owns: every check of what comes from outside, so that the batcher sees only requests that it can serve. A key
that is not implemented is refused by name; nothing is ignored.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.cpu.request import Request
from engines.cpu.sampling import parse_sampling_params
from engines.cpu.tokens import Tokens

_KEYS = frozenset(("text", "input_ids", "rid", "sampling_params", "return_logprob", "logprob_start_len"))
# keys of the API that are not implemented, with the values that ask for nothing
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine can hold: `context_length` of the model, `max_total_tokens` of the arena."""

    vocab_size: int
    context_length: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """The checked requests of one call; `is_batch` says whether the answer is a list."""

    requests: list[Request]
    wants_logprobs: list[bool]
    is_batch: bool


def read_generate(body: object, limits: Limits, tokens: Tokens) -> GenerateCall:
    """Check a body and make its requests. Raises ValueError with a message for the caller."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    for key, value in body.items():
        if key not in _KEYS and value is not None and value not in _NEUTRAL.get(key, ()):
            raise ValueError(f"field `{key}` is not supported by this engine")
    prompts, is_batch = _read_prompts(body, tokens)
    count = len(prompts)
    rids = _spread(body, "rid", None, is_batch, count, one_for_all=False)
    params = _spread(body, "sampling_params", {}, is_batch, count)
    wants = _spread(body, "return_logprob", False, is_batch, count)
    starts = _spread(body, "logprob_start_len", -1, is_batch, count)
    if not all(isinstance(value, bool) for value in wants):
        raise ValueError("return_logprob must be true or false")
    requests = [
        _make_request(rid, prompt, raw, start if want else -1, limits, tokens)
        for rid, prompt, raw, want, start in zip(rids, prompts, params, wants, starts, strict=True)
    ]
    return GenerateCall(requests=requests, wants_logprobs=wants, is_batch=is_batch)


def _spread(
    body: Mapping[str, Any],
    key: str,
    default: object,
    is_batch: bool,
    count: int,
    *,
    one_for_all: bool = True,
) -> list[Any]:
    """The value of `key` for each prompt."""
    value = body.get(key)
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        if is_batch and not one_for_all:
            raise ValueError(f"{key} must be a list for a batch")
        return [value] * count
    if not is_batch or len(value) != count:
        raise ValueError(f"{key} must hold one value for each prompt")
    return [default if item is None else item for item in value]


def _read_prompts(body: Mapping[str, Any], tokens: Tokens) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(item, str) for item in texts):
            raise ValueError("text must be a string or a list of strings")
        return [tokens.encode(item) for item in texts], isinstance(text, list)
    if not isinstance(ids, list):
        raise ValueError(f"input_ids must be a list, got {type(ids).__name__}")
    if not ids:
        raise ValueError("input_ids cannot be empty.")
    is_batch = isinstance(ids[0], list)
    return (ids if is_batch else [ids]), is_batch


def _make_request(
    rid: object, prompt: object, raw_params: object, start: object, limits: Limits, tokens: Tokens
) -> Request:
    if rid is not None and not (isinstance(rid, str) and rid):
        raise ValueError("rid must be a non-empty string")
    if not isinstance(raw_params, dict):
        raise ValueError("sampling_params must be an object")
    ids = _check_ids(prompt, limits)
    params = parse_sampling_params(raw_params, limits.vocab_size)
    if not isinstance(start, int) or isinstance(start, bool) or not -1 <= start <= len(ids):
        raise ValueError(
            f"logprob_start_len must be between -1 and the prompt length {len(ids)}, got {start!r}."
        )
    limit = min(limits.context_length, limits.max_total_tokens)
    given = params.max_new_tokens if raw_params.get("max_new_tokens") is not None else None
    if given is not None and len(ids) + given > limit:
        raise ValueError(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
            f"You requested a total of {len(ids) + given} tokens: {len(ids)} tokens from the input messages "
            f"and {given} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )
    room = limit - len(ids)
    return Request(
        rid=rid if isinstance(rid, str) else uuid.uuid4().hex,
        prompt_ids=ids,
        params=params,
        eos_ids=tokens.eos_ids,
        max_new_tokens=room if params.max_new_tokens is None else min(params.max_new_tokens, room),
        logprob_start=start if start >= 0 else None,
    )


def _check_ids(prompt: object, limits: Limits) -> list[int]:
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise ValueError("input_ids must be non-empty lists of integers.")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise ValueError(
            f"input_ids holds {wrong}, which is not in the vocabulary of {limits.vocab_size} tokens."
        )
    limit = min(limits.context_length, limits.max_total_tokens)
    if len(prompt) >= limit:
        raise ValueError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)."
        )
    return prompt
