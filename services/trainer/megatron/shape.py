"""What defines the network: the Hugging Face config, read and checked.

Owns the architectures this room can build. Knows neither torch nor Megatron, so that a caller's model can be
judged before anything is loaded. Never reads weights (see `weights`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from practicum.errors import InvalidInput


class Family(StrEnum):
    """The architectures this room can build; the values are Hugging Face's `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


_ARCHITECTURES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What defines the network, read from config.json and checked."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool

    @property
    def has_qkv_bias(self) -> bool:
        """Qwen2 puts a bias on q, k and v."""
        return self.family is Family.QWEN2

    @property
    def has_qk_norm(self) -> bool:
        """Qwen3 normalises q and k per head."""
        return self.family is Family.QWEN3


def read_shape(folder: Path) -> ModelShape:
    """The shape in `folder`/config.json. Raises `InvalidInput` naming the field that is wrong."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput("model.path", f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InvalidInput("model.path", f"{path} is not a JSON object")
    return shape_from_config(config)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Check a Hugging Face config. Raises `InvalidInput` naming the field that is wrong."""
    try:
        family = Family(config.get("model_type", ""))
    except ValueError:
        known = ", ".join(Family)
        raise InvalidInput(
            "model_type", f"{config.get('model_type')!r} is not supported; one of {known}"
        ) from None
    _check_architecture(config, family)
    _refuse_variants(config, family)
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_key_heads = _count(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_key_heads:
        raise InvalidInput("num_key_value_heads", f"{num_key_heads} does not divide {num_heads} heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise InvalidInput("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    return ModelShape(
        family=family,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        head_size=_count(config, "head_dim", default=hidden_size // num_heads),
        ffn_size=_count(config, "intermediate_size"),
        max_positions=_count(config, "max_position_embeddings"),
        norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _check_architecture(config: Mapping[str, Any], family: Family) -> None:
    """Other heads on the same body (a classifier's, an embedder's) are other models."""
    given = config.get("architectures")
    if given is not None and given != [_ARCHITECTURES[family]]:
        raise InvalidInput("architectures", f"{given!r} is not supported; {[_ARCHITECTURES[family]]} is")


def _refuse_variants(config: Mapping[str, Any], family: Family) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidInput("hidden_act", f"{config['hidden_act']!r} is not supported; only 'silu'")
    for name in ("mlp_bias", "use_sliding_window"):
        if config.get(name):
            raise InvalidInput(name, "true is not supported")
    if config.get("attention_bias") and family is not Family.QWEN2:
        raise InvalidInput("attention_bias", f"true is not supported for {family}")
    if config.get("quantization_config") is not None:
        raise InvalidInput("quantization_config", "quantized weights cannot be trained")


def _rope_theta(config: Mapping[str, Any]) -> float:
    # Newer configs keep everything about rotary positions in one object, older ones at the top.
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        if not isinstance(rope, Mapping):
            raise InvalidInput(name, f"{rope!r} is not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise InvalidInput(name, f"rope_type {kind!r} is not supported; only 'default'")
        if "rope_theta" in rope:
            return _positive(rope, "rope_theta", 10_000.0)
    return _positive(config, "rope_theta", 10_000.0)


def _count(config: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(name, f"{value!r} is not a positive integer")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InvalidInput(name, f"{value!r} is not a positive number")
    return float(value)
