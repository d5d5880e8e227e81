"""The map between Hugging Face's and Megatron's names and layouts, exact in both directions.

Pure functions on dictionaries of tensors. Megatron stacks q, k and v per key head (the query heads of the
group, then k, then v) and gate above up; nothing is computed, only rearranged, so that a round trip
returns the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from practicum.errors import CheckpointError
from services.trainer.megatron.shape import ModelShape

Weights = dict[str, torch.Tensor]

_LAYER_NAMES = (
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_QK_NORM_NAMES = (
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)


def read_weights(folder: Path) -> Weights:
    """Every tensor of a Hugging Face folder's safetensors files. Raises `CheckpointError`."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        weights: Weights = {}
        for name in names:
            weights.update(load_file(folder / name))
        return weights
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from None


def to_megatron(hf: Mapping[str, torch.Tensor], shape: ModelShape) -> Weights:
    """Megatron's state from Hugging Face's.

    Raises `CheckpointError` naming the tensor that is missing, misshapen or left over.
    """
    expected = dict(hf_shapes(shape))
    for name, size in expected.items():
        if name not in hf:
            raise CheckpointError(f"tensor {name} is missing")
        if tuple(hf[name].shape) != size:
            raise CheckpointError(f"tensor {name} has shape {tuple(hf[name].shape)}, not {size}")
    for name in hf.keys() - expected.keys():
        # A tied head may be stored a second time; old folders carry the rotary frequencies.
        if not (name == "lm_head.weight" and shape.tied_embeddings) and not name.endswith("inv_freq"):
            raise CheckpointError(f"tensor {name} belongs to no part of the model")
    weights = {mine: hf[theirs] for mine, theirs in _plain_names(shape)}
    for layer in range(shape.num_layers):
        mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        weights[f"{mine}mlp.linear_fc1.weight"] = torch.cat(
            [hf[f"{theirs}mlp.gate_proj.weight"], hf[f"{theirs}mlp.up_proj.weight"]]
        )
        for part in _qkv_parts(shape):
            weights[f"{mine}self_attention.linear_qkv.{part}"] = _join_qkv(
                [hf[f"{theirs}self_attn.{x}_proj.{part}"] for x in "qkv"], shape
            )
    return weights


@torch.no_grad()
def load_into(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]
) -> None:
    """Copy Megatron's state into a model and into the fp32 masters its optimizer updates.

    The masters take the source's full precision, which a bf16 model rounds away.
    """
    for name, param in model.named_parameters():
        masters[name].copy_(weights[name])
        param.copy_(masters[name])


def to_huggingface(megatron: Mapping[str, torch.Tensor], shape: ModelShape) -> Weights:
    """Hugging Face's state from Megatron's; the inverse of `to_megatron`."""
    weights = {theirs: megatron[mine] for mine, theirs in _plain_names(shape)}
    for layer in range(shape.num_layers):
        mine, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        gate, up = megatron[f"{mine}mlp.linear_fc1.weight"].chunk(2)
        weights[f"{theirs}mlp.gate_proj.weight"] = gate
        weights[f"{theirs}mlp.up_proj.weight"] = up
        for part in _qkv_parts(shape):
            joined = megatron[f"{mine}self_attention.linear_qkv.{part}"]
            for x, tensor in zip("qkv", _split_qkv(joined, shape), strict=True):
                weights[f"{theirs}self_attn.{x}_proj.{part}"] = tensor
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def hf_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor a Hugging Face folder of this model holds."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    sizes = {
        "q": shape.num_heads * shape.head_size,
        "k": shape.num_key_heads * shape.head_size,
        "v": shape.num_key_heads * shape.head_size,
    }
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for x, size in sizes.items():
            yield f"{prefix}self_attn.{x}_proj.weight", (size, hidden)
            if shape.has_qkv_bias:
                yield f"{prefix}self_attn.{x}_proj.bias", (size,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, sizes["q"])
        if shape.has_qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (shape.head_size,)
            yield f"{prefix}self_attn.k_norm.weight", (shape.head_size,)
        yield f"{prefix}mlp.gate_proj.weight", (ffn, hidden)
        yield f"{prefix}mlp.up_proj.weight", (ffn, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, ffn)


def _plain_names(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """(Megatron's, Hugging Face's) name of every tensor that is the same on both sides."""
    yield "embedding.word_embeddings.weight", "model.embed_tokens.weight"
    yield "decoder.final_layernorm.weight", "model.norm.weight"
    if not shape.tied_embeddings:
        yield "output_layer.weight", "lm_head.weight"
    names = _LAYER_NAMES + (_QK_NORM_NAMES if shape.has_qk_norm else ())
    for layer in range(shape.num_layers):
        for mine, theirs in names:
            yield f"decoder.layers.{layer}.{mine}", f"model.layers.{layer}.{theirs}"


def _qkv_parts(shape: ModelShape) -> tuple[str, ...]:
    return ("weight", "bias") if shape.has_qkv_bias else ("weight",)


def _join_qkv(parts: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    groups = shape.num_key_heads
    per_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(per_group, dim=1).reshape(-1, *parts[0].shape[1:])


def _split_qkv(joined: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    groups, size = shape.num_key_heads, shape.head_size
    per_group = joined.reshape(groups, -1, *joined.shape[1:])
    sizes = [shape.num_heads // groups * size, size, size]
    return [x.reshape(-1, *joined.shape[1:]) for x in torch.split(per_group, sizes, dim=1)]
