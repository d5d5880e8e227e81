"""The forward pass of a Llama-family model over the arena, without autograd.

Owns: arithmetic only. Two shapes of work: `prefill` (several requests' new tokens, laid end to end) and
`decode` (one token for each of the first n slots). The logits equal those of transformers to float rounding.

T tokens in a prefill, N running requests, H query heads, K key-value heads, G = H / K, D head size, L longest
context
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engines.cpu.arena import KvArena
from engines.cpu.config import ModelConfig
from engines.cpu.weights import Layer, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """New tokens of one request in a prefill: they sit at positions start..start+length-1 of `slot`."""

    slot: int
    start: int
    length: int


class Model:
    """A model's arithmetic; `weights` is replaced whole when an update commits."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self._scale = config.head_dim**-0.5
        self._rotations = torch.empty((0, 1, config.head_dim // 2), dtype=torch.complex64)
        self._ensure_rotations(1024)

    def _ensure_rotations(self, num_positions: int) -> None:
        if num_positions > self._rotations.shape[0]:
            angles = torch.outer(torch.arange(num_positions * 2).float(), self.config.inverse_frequencies())
            self._rotations = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [rows, hidden] to float32 logits [rows, vocabulary]."""
        return F.linear(hidden, self.weights.head).float()

    def decode(
        self,
        arena: KvArena,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        rows_N2K: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """One token for each of the first N slots.

        ids_N and positions_N are int64; rows_N2K holds, flat, the arena row of each new key and value within
        a layer (see `kv_rows`); `longest` is the largest position plus one. Returns logits [N, vocabulary].
        """
        config, weights = self.config, self.weights
        num_running = ids_N.shape[0]
        num_batched = num_running * config.num_kv_heads
        group = config.num_heads // config.num_kv_heads
        self._ensure_rotations(longest)
        rotations = self._rotations[positions_N]
        mask = torch.zeros((num_running, longest), dtype=self.dtype)
        mask.masked_fill_(torch.arange(longest) > positions_N.unsqueeze(1), float("-inf"))
        mask = mask.repeat_interleave(config.num_kv_heads, dim=0).unsqueeze(1)
        flat_layers = arena.tensor.view(config.num_layers, -1, config.head_dim)
        heads_layers = arena.tensor.view(config.num_layers, 2, -1, arena.capacity, config.head_dim)
        x = weights.embedding[ids_N]
        for index, layer in enumerate(weights.layers):
            q, kv = self._project(layer, x, rotations)
            flat_layers[index].index_copy_(0, rows_N2K, kv.reshape(-1, config.head_dim))
            keys = heads_layers[index, 0, :num_batched, :longest]
            values = heads_layers[index, 1, :num_batched, :longest]
            q = q.reshape(num_batched, group, config.head_dim)
            scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=self._scale)
            attended = torch.bmm(torch.softmax(scores, -1), values)
            x = self._finish_block(layer, x, attended.view(num_running, -1))
        return self.logits(F.rms_norm(x, (config.hidden_size,), weights.final_norm, config.rms_norm_eps))

    def prefill(
        self, arena: KvArena, ids_T: torch.Tensor, positions_T: torch.Tensor, segments: list[Segment]
    ) -> torch.Tensor:
        """Run the segments' tokens and store their keys and values.

        Returns hidden states [T, hidden], normed.
        """
        config, weights = self.config, self.weights
        self._ensure_rotations(max(segment.start + segment.length for segment in segments))
        rotations = self._rotations[positions_T]
        masks = [self._causal_mask(segment) for segment in segments]
        x = weights.embedding[ids_T]
        for index, layer in enumerate(weights.layers):
            q, kv = self._project(layer, x, rotations)
            attended = torch.empty((x.shape[0], config.num_heads * config.head_dim), dtype=x.dtype)
            offset = 0
            for segment, mask in zip(segments, masks, strict=True):
                end = offset + segment.length
                self._attend(arena, index, segment, mask, q[offset:end], kv[offset:end], attended[offset:end])
                offset = end
            x = self._finish_block(layer, x, attended)
        return F.rms_norm(x, (config.hidden_size,), weights.final_norm, config.rms_norm_eps)

    def _attend(
        self,
        arena: KvArena,
        index: int,
        segment: Segment,
        mask: torch.Tensor | None,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        config = self.config
        end = segment.start + segment.length
        store = arena.tensor[index, :, segment.slot, :, :end]
        store[:, :, segment.start :] = kv.view(segment.length, 2, config.num_kv_heads, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(
            q.view(1, segment.length, config.num_heads, -1).transpose(1, 2),
            store[0].unsqueeze(0),
            store[1].unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        out.copy_(attended[0].transpose(0, 1).reshape(segment.length, -1))

    def _causal_mask(self, segment: Segment) -> torch.Tensor | None:
        """None where plain causal attention is right: nothing came before the segment."""
        if segment.start == 0:
            return None
        mask = torch.full((segment.length, segment.start + segment.length), float("-inf"), dtype=self.dtype)
        return mask.triu_(segment.start + 1)

    def _project(
        self, layer: Layer, x: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [rows, H*D] and, side by side, rotated keys and values [rows, 2*K*D]."""
        config = self.config
        h = F.rms_norm(x, (config.hidden_size,), layer.input_norm, config.rms_norm_eps)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if layer.q_norm is not None and layer.k_norm is not None:
            shape, eps = (config.head_dim,), config.rms_norm_eps
            q_heads = qkv[:, :q_size].view(len(x), -1, config.head_dim)
            k_heads = qkv[:, q_size : q_size + kv_size].view(len(x), -1, config.head_dim)
            q_heads.copy_(F.rms_norm(q_heads, shape, layer.q_norm, eps))
            k_heads.copy_(F.rms_norm(k_heads, shape, layer.k_norm, eps))
        turning = qkv[:, : q_size + kv_size].view(len(x), -1, config.head_dim // 2, 2)
        if qkv.dtype == torch.float32:
            torch.view_as_complex(turning).mul_(rotations)
        else:
            turned = torch.view_as_complex(turning.float().contiguous()).mul_(rotations)
            turning.copy_(torch.view_as_real(turned))
        return qkv[:, :q_size], qkv[:, q_size:]

    def _finish_block(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        config = self.config
        x = torch.addmm(x, attended, layer.output.t())
        if layer.output_bias is not None:
            x += layer.output_bias
        h = F.rms_norm(x, (config.hidden_size,), layer.post_norm, config.rms_norm_eps)
        gate_up = F.linear(h, layer.gate_up, layer.gate_up_bias)
        inner = config.intermediate_size
        x = x.addmm_(F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:]), layer.down.t())
        if layer.down_bias is not None:
            x += layer.down_bias
        return x


def kv_rows(config: ModelConfig, arena: KvArena, positions_N: torch.Tensor) -> torch.Tensor:
    """Flat arena rows, within a layer, where the first N slots' tokens at `positions_N` go: int64 [2 N K].

    The order is that of `decode`'s keys and values: per request its keys, then its values. The rows of the
    next position are these plus one.
    """
    num_slots, heads = arena.num_slots, config.num_kv_heads
    slots = torch.arange(positions_N.shape[0]).view(-1, 1, 1)
    kinds = torch.arange(2).view(1, 2, 1)
    rows = ((kinds * num_slots + slots) * heads + torch.arange(heads)) * arena.capacity
    return (rows + positions_N.view(-1, 1, 1)).flatten()
