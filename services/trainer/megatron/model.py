"""Megatron's GPTModel from a Hugging Face config: Llama, Qwen2 and Qwen3, dense.

Owns the network behind a shape (see `shape`) and the two places where our model departs from Megatron's:
attention is that of a pack (see `attention`), and the head runs only on the positions whose logits are
wanted. Never reads weights (see `weights`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from services.trainer.megatron import cpu
from services.trainer.megatron.attention import PackedAttention, PackedParams
from services.trainer.megatron.shape import ModelShape

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
