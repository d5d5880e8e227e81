"""Megatron's GPTModel from a Hugging Face config: Llama, Qwen2 and Qwen3, dense.

Owns the translation of the config and the two places where our model departs from Megatron's: attention is
that of a pack (see `attention`), and the head runs only on the positions whose logits are wanted. Never
reads weights (see `weights`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from practicum.errors import InvalidInput
from services.trainer.megatron import cpu
from services.trainer.megatron.attention import PackedAttention, PackedParams

with cpu.quiet_import():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


class Family(StrEnum):
    """The architectures this room can build; the values are Hugging Face's `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


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


class PackedGptModel(GPTModel):  # type: ignore[misc]
    """GPTModel over a packed micro-batch; the head runs on `head_index_U` only."""

    def _postprocess(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        packed: PackedParams = kwargs["packed_seq_params"]
        if packed.head_index_U is not None:
            hidden_states = F.embedding(packed.head_index_U, hidden_states[:, 0]).unsqueeze(1)
        logits: torch.Tensor = super()._postprocess(hidden_states=hidden_states, **kwargs)
        return logits


def logits_of(model: torch.nn.Module, ids_N: torch.Tensor, packed: PackedParams) -> torch.Tensor:
    """Logits [U, vocabulary] of the wanted positions of one micro-batch, in the model's own dtype."""
    with warnings.catch_warnings():
        # One of Megatron's own layers calls another without the group it asks for.
        warnings.filterwarnings("ignore", message="Warning: tp_group is None", category=DeprecationWarning)
        logits_1UV: torch.Tensor = model(
            input_ids=ids_N.unsqueeze(0), position_ids=None, attention_mask=None, packed_seq_params=packed
        )
    return logits_1UV[0]


def build_model(shape: ModelShape, dtype: torch.dtype) -> PackedGptModel:
    """A model of that shape with Megatron's initialisation; its parallel state must be up."""
    config = _transformer_config(shape, dtype)
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.has_qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=PackedAttention, params={"rope_theta": shape.rope_theta}
    )
    with warnings.catch_warnings():
        # Megatron's own layer spec leaves this size to the config and Megatron then warns about it.
        warnings.filterwarnings("ignore", message="MLP requires ffn_hidden_size", category=DeprecationWarning)
        model = PackedGptModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            position_embedding_type="none",  # the attention turns queries and keys itself
            share_embeddings_and_output_weights=shape.tied_embeddings,
            parallel_output=False,
        )
    model.to(dtype)
    return model


def _transformer_config(shape: ModelShape, dtype: torch.dtype) -> Any:
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_heads,
        ffn_hidden_size=shape.ffn_size,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Loss sums and token counts: the schedule divides the step's gradient once, by the step's count,
        # so that the split into micro-batches cannot change it.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )


def wrap_for_training(model: PackedGptModel) -> Any:
    """Megatron's DDP around the model, with the schedule's hooks set: gradients gather in fp32 buffers."""
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
        ),
        module=model,
    )
    model.config.no_sync_func = ddp.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return ddp
