"""Starts a fresh Llama with the attention heads that copy: a previous-token head and induction heads.

Pretraining gives any language model these heads (Olsson et al. 2022, "In-context Learning and Induction
Heads", arXiv:2209.11895); a fresh one of 3 million weights needs millions of tokens until they form, which a
warm start of minutes does not have. Owns that initialisation and nothing else. Knows no task, token or
answer: the heads say only "what followed this token before may follow it again", and training may change
them.

H hidden, D head dimension, M dimensions that match tokens.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

ROPE_THETA = 1e5  # most pairs of a head turn so slowly that they match contents over hundreds of tokens
CONSTANT = 0.35  # coordinate 0 of every embedding: what position-only attention reads
_FAST_PAIRS = 4  # RoPE pairs that tell the previous token from its neighbours
_SLOW_FROM = 6  # first RoPE pair that turns less than a radian over a hundred tokens
_SHARPNESS = 12.0  # attention score of a pair, and of a match
_PREVIOUS = 0.15  # scale at which the previous token is written
_QUIET = 0.1  # what the other heads and the MLPs write at the start, so that they do not drown the copies
_MATCH_NOISE = 1.7  # scale of the matched contents after the norm


def plant_copying(model: LlamaForCausalLM, seed: int) -> None:
    """Writes the heads into the first two layers, in place.

    Expects `rope_theta` ROPE_THETA and tied embeddings.
    """
    draw = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    embedding_VH: Tensor = model.model.embed_tokens.weight.data
    spread = float(embedding_VH.std())
    embedding_VH[:, 0] = CONSTANT
    constant = CONSTANT / math.sqrt(spread**2 + CONSTANT**2 / hidden)  # coordinate 0 after the first norm
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(_QUIET)
        layer.mlp.down_proj.weight.data.mul_(_QUIET)
    half = hidden // model.config.num_attention_heads // 2
    slow = torch.arange(_SLOW_FROM, half)
    dims_M = torch.cat([slow, slow + half])
    code_MH = torch.randn(len(dims_M), hidden, generator=draw) / math.sqrt(hidden)
    written_HM = torch.linalg.qr(torch.randn(hidden, len(dims_M), generator=draw)).Q
    code_MH[:, 0], written_HM[0] = 0, 0
    _plant_previous(model, constant, code_MH, written_HM)
    _plant_induction(model, draw, dims_M, code_MH, written_HM)


def _plant_previous(model: LlamaForCausalLM, constant: float, code_MH: Tensor, written_HM: Tensor) -> None:
    """Head 0 of layer 0 looks one token back, whatever stands there, and writes its code."""
    attention = model.model.layers[0].self_attn
    size = attention.head_dim
    query_DH, key_DH, value_DH = (
        projection.weight.data[:size].zero_()
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    weight = math.sqrt(_SHARPNESS * math.sqrt(size)) / constant
    for pair in range(_FAST_PAIRS):
        # a key turned by one position's angle: the score peaks where query - key = 1
        angle = ROPE_THETA ** (-2 * pair / size)
        query_DH[pair, 0] = weight
        key_DH[pair, 0] = weight * math.cos(angle)
        key_DH[pair + size // 2, 0] = weight * math.sin(angle)
    value_DH[: len(code_MH)] = code_MH
    out_HD = attention.o_proj.weight.data[:, :size].zero_()
    out_HD[:, : len(code_MH)] = _PREVIOUS * written_HM


def _plant_induction(
    model: LlamaForCausalLM, draw: torch.Generator, dims_M: Tensor, code_MH: Tensor, written_HM: Tensor
) -> None:
    """The first head over each key-value head of layer 1 looks behind earlier copies of the token."""
    attention = model.model.layers[1].self_attn
    size, hidden = attention.head_dim, model.config.hidden_size
    gain = math.sqrt(_SHARPNESS * math.sqrt(size) / len(dims_M) / _MATCH_NOISE)
    for shared in range(model.config.num_key_value_heads):
        head = shared * attention.num_key_value_groups
        queries, keys = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
        attention.q_proj.weight.data[queries] = 0
        attention.q_proj.weight.data[queries][dims_M] = gain * code_MH
        attention.k_proj.weight.data[keys] = 0
        attention.k_proj.weight.data[keys][dims_M] = gain * written_HM.T
        copy_DH = torch.linalg.qr(torch.randn(hidden, size, generator=draw)).Q.T
        copy_DH[:, 0] = 0
        attention.v_proj.weight.data[keys] = copy_DH
        attention.o_proj.weight.data[:, queries] = copy_DH.T
