"""Sampling parameters and one sampler call for a whole batch.

Owns: reading and checking `sampling_params`, and drawing a token with its logprob for every row at once.
Never ignores a parameter: what is not implemented is refused by name.

The logprob of a token is `log_softmax(logits / temperature)` (temperature 0 counts as 1), without the kept
set of top_p, top_k and min_p; end-of-sequence and stop ids that `min_new_tokens` forbids are taken out
before.

N rows, V vocabulary
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_LARGEST_UNIFORM = 1 - 2**-23  # keeps u * total below total after rounding to float32
_KEEP_ALL = (1.0, -1, 0.0)

# keys of the API that this engine does not implement, with the values that ask for nothing
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "n": (None, 1),
    "beam_width": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None,),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None,),
    "watermark": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Checked parameters of one request; `max_new_tokens` None means up to the context length."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def keeps_all(self) -> bool:
        """True where neither top_p, top_k nor min_p narrows the choice."""
        return (self.top_p, self.top_k, self.min_p) == _KEEP_ALL


def parse_sampling_params(raw: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Check `sampling_params` of a request; a null value means the default.

    Raises ValueError naming the key.
    """
    known = SamplingParams.__dataclass_fields__
    given: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise ValueError(f"sampling parameter `{key}` is not supported by this engine")
        elif key not in known:
            raise ValueError(
                f"unknown field `{key}`, expected one of {', '.join(f'`{name}`' for name in known)}"
            )
        elif value is not None or key == "max_new_tokens":
            given[key] = _READERS[key](key, value)
    params = SamplingParams(**given)
    limit = params.max_new_tokens
    if limit is not None and params.min_new_tokens > limit:
        raise ValueError(
            f"min_new_tokens must be in [0, max_new_tokens({limit})], got {params.min_new_tokens}."
        )
    if any(token >= vocab_size for token in params.stop_token_ids):
        raise ValueError(f"stop_token_ids must be below the vocabulary size {vocab_size}.")
    return params


def _read_count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key} must be a non-negative integer, got {value!r}.")
    return value


def _read_limit(key: str, value: object) -> int | None:
    return None if value is None else _read_count(key, value)


def _read_number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value!r}.")
    return float(value)


def _read_temperature(key: str, value: object) -> float:
    number = _read_number(key, value)
    if number < 0:
        raise ValueError(f"{key} must be a non-negative finite number, got {value}.")
    return 0.0 if number < 1e-6 else number


def _read_top_p(key: str, value: object) -> float:
    number = _read_number(key, value)
    if not 0 < number <= 1:
        raise ValueError(f"{key} must be in (0, 1], got {value}.")
    return number


def _read_min_p(key: str, value: object) -> float:
    number = _read_number(key, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{key} must be in [0, 1], got {value}.")
    return number


def _read_top_k(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"{key} must be -1 (all) or at least 1, got {value!r}.")
    return value


def _read_flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}.")
    return value


def _read_stop(key: str, value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
        raise ValueError(f"{key} must be a non-empty string or a list of them, got {value!r}.")
    return tuple(values)


def _read_ids(key: str, value: object) -> frozenset[int]:
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list of token ids, got {value!r}.")
    return frozenset(_read_count(key, item) for item in value)


def _read_seed(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, got {value!r}.")
    return value


_READERS: dict[str, Any] = {
    "max_new_tokens": _read_limit,
    "min_new_tokens": _read_count,
    "temperature": _read_temperature,
    "top_p": _read_top_p,
    "top_k": _read_top_k,
    "min_p": _read_min_p,
    "stop": _read_stop,
    "stop_token_ids": _read_ids,
    "ignore_eos": _read_flag,
    "skip_special_tokens": _read_flag,
    "no_stop_trim": _read_flag,
    "sampling_seed": _read_seed,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """The M rows that do not choose from the whole vocabulary; rows_M is int64, the limits are [M, 1]."""

    rows_M: torch.Tensor
    top_k_M1: torch.Tensor
    top_p_M1: torch.Tensor
    min_p_M1: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """What a batch of N rows needs, worked out once per composition of the batch.

    None skips the operation.
    """

    temperatures_N1: torch.Tensor | None
    greedy_N: torch.Tensor | None
    narrowing: Narrowing | None
    seeded: Sequence[tuple[int, int]]  # row, seed

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "SamplingPlan":
        """Plan for rows with these parameters."""
        temperatures = [item.temperature or 1.0 for item in params]
        greedy = [item.temperature == 0 for item in params]
        narrow = [(row, item) for row, item in enumerate(params) if not item.keeps_all and item.temperature]
        return cls(
            temperatures_N1=torch.tensor(temperatures).unsqueeze(1) if set(temperatures) - {1.0} else None,
            greedy_N=torch.tensor(greedy) if any(greedy) else None,
            narrowing=_narrowing(narrow) if narrow else None,
            seeded=[(row, p.sampling_seed) for row, p in enumerate(params) if p.sampling_seed is not None],
        )


def _narrowing(rows: Sequence[tuple[int, SamplingParams]]) -> Narrowing:
    top_k = [item.top_k if item.top_k > 0 else 2**31 for _, item in rows]
    return Narrowing(
        rows_M=torch.tensor([row for row, _ in rows]),
        top_k_M1=torch.tensor(top_k).unsqueeze(1),
        top_p_M1=torch.tensor([item.top_p for _, item in rows]).unsqueeze(1),
        min_p_M1=torch.tensor([item.min_p for _, item in rows]).unsqueeze(1),
    )


def sample(
    logits_NV: torch.Tensor,
    plan: SamplingPlan,
    forbidden: Sequence[tuple[int, Sequence[int]]],
    num_sampled: Sequence[int],
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution: one uniform number a row.

    `forbidden` names rows and ids that may not come yet; `num_sampled` is each row's count of tokens so far
    (a seeded row's randomness depends on its seed and this count only). Overwrites `logits_NV`. Returns ids
    int64 [N] and logprobs float32 [N]; a logprob is NaN where the logits were not finite.
    """
    for row, ids in forbidden:
        logits_NV[row, list(ids)] = float("-inf")
    if plan.temperatures_N1 is not None:
        logits_NV = logits_NV.div_(plan.temperatures_N1)
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    weights_NV = logprobs_NV.exp()
    if plan.narrowing is not None:
        weights_NV[plan.narrowing.rows_M] = _narrow(weights_NV[plan.narrowing.rows_M], plan.narrowing)
    cumulative_NV = weights_NV.cumsum_(-1)
    uniform_N = torch.rand(logits_NV.shape[0], generator=generator)
    if plan.seeded:
        rows = torch.tensor([row for row, _ in plan.seeded])
        uniform_N[rows] = torch.tensor([_seeded_uniform(seed, num_sampled[row]) for row, seed in plan.seeded])
    targets_N1 = uniform_N.mul_(_LARGEST_UNIFORM).unsqueeze(1) * cumulative_NV[:, -1:]
    ids_N = torch.searchsorted(cumulative_NV, targets_N1, right=True).squeeze(1)
    ids_N.clamp_(max=logits_NV.shape[1] - 1)  # a row of NaN finds no place
    if plan.greedy_N is not None:
        ids_N = torch.where(plan.greedy_N, logprobs_NV.argmax(-1), ids_N)
    return ids_N, logprobs_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1)


def _narrow(weights_MV: torch.Tensor, limits: Narrowing) -> torch.Tensor:
    """Zero what top_k, then top_p (on the mass left by top_k), then min_p drop; the likeliest token stays."""
    ordered_MV, order_MV = weights_MV.sort(descending=True)
    kept_MV = torch.arange(ordered_MV.shape[1]) < limits.top_k_M1
    mass_MV = torch.where(kept_MV, ordered_MV, 0.0)
    mass_MV = mass_MV / mass_MV.sum(-1, keepdim=True)
    kept_MV &= mass_MV.cumsum(-1) - mass_MV < limits.top_p_M1
    kept_MV &= ordered_MV >= ordered_MV[:, :1] * limits.min_p_M1
    kept_MV[:, 0] = True
    return torch.zeros_like(weights_MV).scatter(1, order_MV, torch.where(kept_MV, ordered_MV, 0.0))


def _seeded_uniform(seed: int, count: int) -> float:
    """A number in [0, 1) from a seed and a count (the finaliser of SplitMix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (count + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 31)) >> 40) / 2**24
