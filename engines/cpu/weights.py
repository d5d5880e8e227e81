"""The tensors of a model folder, laid out for the forward pass.

Owns: reading safetensors, checking names and shapes, fusing, and the way back (checksums of what is served).
Never touches a model that is being served: a new `Weights` is built whole, then swapped in by the batcher, so
a folder that turns out wrong half-way leaves nothing behind.

Query and key rows are stored with the two halves of a head interleaved. A rotation then is one complex
product on neighbouring numbers; attention scores do not change, because queries and keys are permuted alike.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engines.cpu.config import ModelConfig, read_config

Shape = tuple[int, ...]


class WeightsRefused(ValueError):
    """The folder does not hold exactly the tensors of the served model; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer block. Matrices are [out, in]; a bias or a head norm that the model lacks is None."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A complete set of weights. `file_dtypes` is the type of each tensor as the folder holds it."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    file_dtypes: dict[str, torch.dtype]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that a folder of this model must hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    shapes["model.norm.weight"] = (hidden,)
    for index in range(config.num_layers):
        block = f"model.layers.{index}."
        for name, rows, biased in (("q", q_rows, config.qkv_bias), ("k", kv_rows, config.qkv_bias),
                                   ("v", kv_rows, config.qkv_bias)):  # fmt: skip
            shapes[f"{block}self_attn.{name}_proj.weight"] = (rows, hidden)
            if biased:
                shapes[f"{block}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{block}self_attn.o_proj.weight"] = (hidden, q_rows)
        if config.output_bias:
            shapes[f"{block}self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[f"{block}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{block}self_attn.k_norm.weight"] = (config.head_dim,)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            shapes[f"{block}mlp.{name}_proj.weight"] = (rows, columns)
            if config.mlp_bias:
                shapes[f"{block}mlp.{name}_proj.bias"] = (rows,)
        shapes[f"{block}input_layernorm.weight"] = (hidden,)
        shapes[f"{block}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read every tensor of `folder` and lay them out; the caller decides when to serve them.

    Raises WeightsRefused when the folder's config, names, shapes or bytes are not those of `config`'s model.
    """
    try:
        found_config = read_config(folder)
    except (OSError, KeyError, ValueError) as error:
        raise WeightsRefused(f"config.json of {folder}: {error}") from error
    if found_config != config:
        raise WeightsRefused(f"config.json of {folder} describes another model than the one being served")
    tensors = _read_tensors(folder)
    _check(tensors, config)
    file_dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    converted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return Weights(
        embedding=converted["model.embed_tokens.weight"],
        layers=tuple(_fuse_layer(converted, index, config) for index in range(config.num_layers)),
        final_norm=converted["model.norm.weight"],
        head=converted["model.embed_tokens.weight" if config.tied else "lm_head.weight"],
        file_dtypes=file_dtypes,
    )


def checksums(weights: Weights, config: ModelConfig) -> dict[str, str]:
    """SHA-256 of each served tensor under its Hugging Face name.

    Bytes are hashed in the type of the folder, so that the answer equals a manifest of that folder (unless
    the engine runs in a type that cannot hold the folder's values).
    """
    return {
        name: hashlib.sha256(_tensor_bytes(tensor.to(weights.file_dtypes[name]))).hexdigest()
        for name, tensor in _unfuse(weights, config)
    }


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors.update(load_file(folder / name))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise WeightsRefused(f"cannot read the tensors of {folder}: {error}") from error
    return tensors


def _check(tensors: dict[str, torch.Tensor], config: ModelConfig) -> None:
    shapes = expected_shapes(config)
    if config.tied and "lm_head.weight" in tensors:
        # some exporters write the tied head a second time; an equal copy is no other tensor
        if not torch.equal(
            tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight", torch.empty(0))
        ):
            raise WeightsRefused("lm_head.weight differs from the embedding that the config ties it to")
        del tensors["lm_head.weight"]
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise WeightsRefused(
            f"{len(missing)} tensors missing: {missing[:3]}; {len(unknown)} unknown: {unknown[:3]}"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightsRefused(f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}")
        if not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name]).all()):
            raise WeightsRefused(f"{name} holds values that are not finite numbers")


def _interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, ...] with each head's halves woven: 0, d/2, 1, d/2 + 1, ..."""
    heads = rows.shape[0] // head_dim
    return rows.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(rows.shape).contiguous()


def _deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The way back from `_interleave`."""
    heads = rows.shape[0] // head_dim
    return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape).contiguous()


def _fuse_layer(tensors: dict[str, torch.Tensor], index: int, config: ModelConfig) -> Layer:
    block, head_dim = f"model.layers.{index}.", config.head_dim

    def optional(name: str) -> torch.Tensor | None:
        return tensors.get(block + name)

    def fuse_qkv(part: str) -> torch.Tensor:
        q, k, v = (tensors[f"{block}self_attn.{name}_proj.{part}"] for name in "qkv")
        return torch.cat((_interleave(q, head_dim), _interleave(k, head_dim), v))

    def fuse_gate_up(part: str) -> torch.Tensor:
        return torch.cat((tensors[f"{block}mlp.gate_proj.{part}"], tensors[f"{block}mlp.up_proj.{part}"]))

    q_norm, k_norm = optional("self_attn.q_norm.weight"), optional("self_attn.k_norm.weight")
    return Layer(
        input_norm=tensors[block + "input_layernorm.weight"],
        qkv=fuse_qkv("weight"),
        qkv_bias=fuse_qkv("bias") if config.qkv_bias else None,
        q_norm=None if q_norm is None else _interleave(q_norm, head_dim),
        k_norm=None if k_norm is None else _interleave(k_norm, head_dim),
        output=tensors[block + "self_attn.o_proj.weight"],
        output_bias=optional("self_attn.o_proj.bias"),
        post_norm=tensors[block + "post_attention_layernorm.weight"],
        gate_up=fuse_gate_up("weight"),
        gate_up_bias=fuse_gate_up("bias") if config.mlp_bias else None,
        down=tensors[block + "mlp.down_proj.weight"],
        down_bias=optional("mlp.down_proj.bias"),
    )


def _unfuse(weights: Weights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every served tensor under its Hugging Face name and in its original layout."""
    yield "model.embed_tokens.weight", weights.embedding
    if not config.tied:
        yield "lm_head.weight", weights.head
    yield "model.norm.weight", weights.final_norm
    for index, layer in enumerate(weights.layers):
        for name, tensor in _unfuse_layer(layer, config):
            yield f"model.layers.{index}.{name}", tensor


def _unfuse_layer(layer: Layer, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for part, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None:
            q, k, v = torch.split(fused, [q_rows, kv_rows, kv_rows])
            yield f"self_attn.q_proj.{part}", _deinterleave(q.contiguous(), config.head_dim)
            yield f"self_attn.k_proj.{part}", _deinterleave(k.contiguous(), config.head_dim)
            yield f"self_attn.v_proj.{part}", v
    for part, fused in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
        if fused is not None:
            gate, up = fused.chunk(2)
            yield f"mlp.gate_proj.{part}", gate
            yield f"mlp.up_proj.{part}", up
    for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
        if norm is not None:
            yield f"self_attn.{name}.weight", _deinterleave(norm, config.head_dim)
    for name, tensor in (
        ("input_layernorm.weight", layer.input_norm),
        ("self_attn.o_proj.weight", layer.output),
        ("self_attn.o_proj.bias", layer.output_bias),
        ("post_attention_layernorm.weight", layer.post_norm),
        ("mlp.down_proj.weight", layer.down),
        ("mlp.down_proj.bias", layer.down_bias),
    ):
        if tensor is not None:
            yield name, tensor
