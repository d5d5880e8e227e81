"""What a model folder's config.json says about a Llama-family model.

Owns: reading config.json and the stop ids. Never reads tensors. Everything that the forward pass does not
implement is refused here, so that a model is either served exactly or not at all.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnsupportedModel(ValueError):
    """The folder's config asks for something that this engine does not implement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family model.

    Invariants: `num_heads` is a multiple of `num_kv_heads`; `head_dim` is even.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_type: str
    rope_options: tuple[tuple[str, float], ...]

    def inverse_frequencies(self) -> torch.Tensor:
        """RoPE inverse frequencies, float32 [head_dim / 2] (plain, linear or Llama 3's smooth scaling)."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        options = dict(self.rope_options)
        if self.rope_type == "linear":
            return frequencies / options["factor"]
        if self.rope_type != "llama3":
            return frequencies
        factor, original = options["factor"], options["original_max_position_embeddings"]
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        wavelengths = 2 * math.pi / frequencies
        smooth = (original / wavelengths - low) / (high - low)
        smoothed = (1 - smooth) * frequencies / factor + smooth * frequencies
        scaled = torch.where(wavelengths > original / low, frequencies / factor, smoothed)
        return torch.where(wavelengths < original / high, frequencies, scaled)


def read_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`.

    Raises UnsupportedModel for what the engine cannot serve exactly, OSError or ValueError for a broken file.
    """
    raw = json.loads((folder / "config.json").read_text())
    architecture = (raw.get("architectures") or ["?"])[0]
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(f"architecture {architecture} is not one of {', '.join(_ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']} is not supported, only silu")
    if raw.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window is not supported")
    num_heads = int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else int(raw["hidden_size"]) // num_heads
    theta, rope_type, options = _read_rope(raw)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or default_head_dim),
        context_length=int(raw.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or is_qwen2,
        output_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope_theta=theta,
        rope_type=rope_type,
        rope_options=options,
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UnsupportedModel("attention heads must be a multiple of key-value heads, head_dim must be even")
    return config


def _read_rope(raw: dict[str, Any]) -> tuple[float, str, tuple[tuple[str, float], ...]]:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", raw.get("rope_theta", 10000.0)))
    rope_type = str(rope.pop("rope_type", rope.pop("type", "default")))
    if rope_type not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rope_type {rope_type} is not supported, only default, linear and llama3")
    if float(rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported")
    numbers = {key: float(value) for key, value in rope.items() if isinstance(value, int | float)}
    return theta, rope_type, tuple(sorted(numbers.items()))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """End-of-sequence ids of the folder: config.json and generation_config.json together."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if not path.exists():
            continue
        eos = json.loads(path.read_text()).get("eos_token_id")
        if eos is not None:
            found.update(eos if isinstance(eos, list) else [eos])
    return frozenset(found)
