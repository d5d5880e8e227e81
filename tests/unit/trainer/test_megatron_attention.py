"""Attention over packed segments against one dense mask over the whole pack."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.megatron.attention import PackedAttention, PackedParams, plan_blocks
from services.trainer.megatron.packing import Segment

NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 4, 2, 8


@dataclass
class Config:
    """What the module reads of Megatron's config."""

    kv_channels: int = HEAD_SIZE


def packed_segments(roots: list[tuple[int, list[int]]]) -> list[Segment]:
    """Segments of the given sizes in the order packing gives them: roots, then children, short ones first."""
    segments: list[Segment] = []
    start = 0
    places: list[tuple[int, int]] = []
    for size, _ in roots:
        places.append((start, start + size))
        segments.append(Segment(start=start, end=start + size))
        start += size
    children = sorted((size, root) for root, (_, sizes) in enumerate(roots) for size in sizes)
    for size, root in children:
        segments.append(Segment(start=start, end=start + size, path=(places[root],)))
        start += size
    return segments


def dense_mask(segments: list[Segment]) -> torch.Tensor:
    num_packed = segments[-1].end
    mask_NN = torch.zeros(num_packed, num_packed, dtype=torch.bool)
    for segment in segments:
        for start, end in segment.path:
            mask_NN[segment.start : segment.end, start:end] = True
        for token in range(segment.start, segment.end):
            mask_NN[token, segment.start : token + 1] = True
    return mask_NN


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 10), max_size=4)), min_size=1, max_size=5)
)
def test_packed_attention_for_any_segments_then_equals_a_dense_mask(
    roots: list[tuple[int, list[int]]],
) -> None:
    segments = packed_segments(roots)
    num_packed = segments[-1].end
    generator = torch.Generator().manual_seed(num_packed)
    inputs = [
        torch.randn(num_packed, heads, HEAD_SIZE, generator=generator, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    ]
    # Position 0 everywhere: rotary positions are the same turn for all and cancel out.
    packed = PackedParams.of(torch.zeros(num_packed, dtype=torch.long), plan_blocks(segments), None)
    attention = PackedAttention(Config(), rope_theta=10_000.0)
    out = attention(*inputs, None, packed_seq_params=packed)
    weights = torch.randn(out.shape, generator=generator)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)

    query, key, value = (x.transpose(0, 1)[None] for x in inputs)
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(segments), enable_gqa=True)
    expected = dense[0].transpose(0, 1).reshape(num_packed, -1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_plan_when_segments_are_alike_then_one_block_and_when_not_then_more() -> None:
    alike = packed_segments([(20, []), (20, []), (19, [])])
    assert [block.num_segments for block in plan_blocks(alike)] == [3]
    assert plan_blocks(packed_segments([(20, []), (20, [])]))[0].query_index is None
    uneven = packed_segments([(2, []), (20, [])])
    assert [block.num_segments for block in plan_blocks(uneven)] == [1, 1]


def test_plan_when_paths_differ_in_length_then_shorter_ones_are_masked() -> None:
    segments = packed_segments([(10, [6]), (9, [6])])
    (_, block) = plan_blocks(segments)
    assert block.num_segments == 2
    assert block.mask_S1QK is not None
    hidden = block.mask_S1QK[:, 0, :, :10].isinf().sum(-1)
    assert sorted(hidden[:, 0].tolist()) == [0, 1]
    assert block.mask_S1QK.shape == (2, 1, 6, 16)
    assert pytest.approx(0) == block.mask_S1QK[0, 0, 5, 10:].abs().sum().item()
