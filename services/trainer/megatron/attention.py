"""Attention over packed segments that may continue other segments.

A micro-batch is N tokens cut into segments. A segment continues a path of earlier segments (a prompt that
several rows share is one segment, each row's own tokens another): its queries see the whole path, then
themselves causally. Owns the plan of kernel calls and the module Megatron calls as core attention.

Why blocks: one kernel call for many short segments, padded to the longest of them, takes about half the
time of one call per segment on a CPU; blocks are cut so that padding stays below a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.trainer.megatron import cpu
from services.trainer.megatron.packing import Segment
from services.trainer.megatron.rotary import Rotation

with cpu.quiet_import():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import MegatronModule

# N packed token, S segment of a block, Q query slot, K key slot, H query head, G key head, D head size

_MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """One kernel call: S segments, queries padded to Q slots, keys to K slots."""

    start: int  # the block's queries are packed tokens [start, end)
    end: int
    num_segments: int
    query_index: torch.Tensor | None  # [S*Q] packed token of a slot; None = the range itself, unpadded
    key_index: torch.Tensor | None  # [S*K]; None = keys are the queries' own tokens
    mask_S1QK: torch.Tensor | None  # additive float; None = causal
    kept_slot_N: torch.Tensor | None  # slots of the block's tokens in packed order; None = all


def plan_blocks(segments: Sequence[Segment]) -> list[AttentionBlock]:
    """Cut segments, given in packed order, into blocks of consecutive ones with little padding."""
    blocks: list[AttentionBlock] = []
    pending: list[Segment] = []
    for segment in segments:
        if pending and not _fits(pending, segment):
            blocks.append(_block(pending))
            pending = []
        pending.append(segment)
    if pending:
        blocks.append(_block(pending))
    return blocks


def _fits(pending: Sequence[Segment], segment: Segment) -> bool:
    if bool(segment.path) != bool(pending[0].path):
        return False
    candidates = [*pending, segment]
    num_slots = _num_slots(candidates)
    used = sum(s.num_tokens * (s.num_path_tokens + s.num_tokens) for s in candidates)
    return used >= (1 - _MAX_PADDING) * num_slots


def _num_slots(segments: Sequence[Segment]) -> int:
    longest = max(s.num_tokens for s in segments)
    return len(segments) * longest * (longest + max(s.num_path_tokens for s in segments))


def _block(segments: Sequence[Segment]) -> AttentionBlock:
    num_queries = max(s.num_tokens for s in segments)
    padded = any(s.num_tokens != num_queries for s in segments)
    query_SQ = np.stack([_padded(np.arange(s.start, s.end), num_queries) for s in segments])
    kept: torch.Tensor | None = None
    if padded:
        lengths_S1 = np.array([[s.num_tokens] for s in segments])
        kept = torch.from_numpy(np.flatnonzero(np.arange(num_queries)[None, :] < lengths_S1))
    key_index: torch.Tensor | None = None
    mask_S1QK: torch.Tensor | None = None
    if segments[0].path:
        num_path = max(s.num_path_tokens for s in segments)
        path_SK = np.stack([_padded(_path_tokens(s), num_path) for s in segments])
        key_index = torch.from_numpy(np.concatenate([path_SK, query_SQ], axis=1).reshape(-1))
        mask_S1QK = _mask(segments, num_path, num_queries)
    return AttentionBlock(
        start=segments[0].start,
        end=segments[-1].end,
        num_segments=len(segments),
        query_index=torch.from_numpy(query_SQ.reshape(-1)) if padded else None,
        key_index=key_index,
        mask_S1QK=mask_S1QK,
        kept_slot_N=kept,
    )


def _padded(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    # Padding repeats the first token: any real token serves, since no kept query sees the slot.
    return np.concatenate([tokens, np.full(size - tokens.size, tokens[0])])


def _path_tokens(segment: Segment) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, end) for start, end in segment.path])


def _mask(segments: Sequence[Segment], num_path: int, num_queries: int) -> torch.Tensor:
    mask_SQK = torch.zeros(len(segments), num_queries, num_path + num_queries)
    for index, segment in enumerate(segments):
        mask_SQK[index, :, segment.num_path_tokens : num_path] = -torch.inf
    future_QQ = torch.ones(num_queries, num_queries, dtype=torch.bool).triu(1)
    mask_SQK[:, :, num_path:].masked_fill_(future_QQ, -torch.inf)
    return mask_SQK.unsqueeze(1)


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]  # Megatron is untyped
    """What a packed micro-batch tells the model besides its tokens.

    Megatron hands it to every layer. To Megatron the pack is one sequence of N tokens; positions and which
    token sees which are ours alone.
    """

    positions_N: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    blocks: Sequence[AttentionBlock] = ()
    head_index_U: torch.Tensor | None = None  # packed tokens whose logits are wanted; None = all
    rotation: Rotation | None = None  # made by the first layer for all of them

    @classmethod
    def of(
        cls, positions_N: torch.Tensor, blocks: Sequence[AttentionBlock], head_index_U: torch.Tensor | None
    ) -> PackedParams:
        """The parameters of one micro-batch of N packed tokens."""
        ends = torch.tensor([0, positions_N.numel()], dtype=torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=positions_N.numel(),
            max_seqlen_kv=positions_N.numel(),
            positions_N=positions_N,
            blocks=blocks,
            head_index_U=head_index_U,
        )


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Rotary positions and scaled dot-product attention over the blocks of a packed micro-batch."""

    def __init__(
        self, config: Any, *, rope_theta: float, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.rope_theta = rope_theta
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query_NHD: torch.Tensor,
        key_NGD: torch.Tensor,
        value_NGD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within every segment and its path; returns [N, H*D]."""
        rotation = self._rotation(packed_seq_params, query_NHD)
        query_NHD, key_NGD = rotation.turn(query_NHD), rotation.turn(key_NGD)
        outputs = [self._attend(block, query_NHD, key_NGD, value_NGD) for block in packed_seq_params.blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rotation(self, packed: PackedParams, query_NHD: torch.Tensor) -> Rotation:
        if packed.rotation is None:
            packed.rotation = Rotation.of(
                packed.positions_N,
                head_size=query_NHD.size(-1),
                theta=self.rope_theta,
                dtype=query_NHD.dtype,
            )
        return packed.rotation

    def _attend(
        self, block: AttentionBlock, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        size = block.num_segments
        own = (block.start, block.end, block.query_index)
        keys = own if block.key_index is None else (0, 0, block.key_index)
        mask = block.mask_S1QK
        out_SHQD = F.scaled_dot_product_attention(
            _slots(query, size, *own),
            _slots(key, size, *keys),
            _slots(value, size, *keys),
            attn_mask=None if mask is None else mask.to(query.dtype),
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        out = out_SHQD.transpose(1, 2).reshape(-1, query.size(1) * query.size(2))
        return out if block.kept_slot_N is None else F.embedding(block.kept_slot_N, out)


def _slots(
    x_NHD: torch.Tensor, num_segments: int, start: int, end: int, index: torch.Tensor | None
) -> torch.Tensor:
    """The tokens of a block's slots as [S, H, slots, D]."""
    num_heads, head_size = x_NHD.shape[1:]
    # F.embedding gathers rows like index_select, with a backward three times as fast on a CPU.
    x = x_NHD[start:end] if index is None else F.embedding(index, x_NHD.reshape(-1, num_heads * head_size))
    return x.view(num_segments, -1, num_heads, head_size).transpose(1, 2)
