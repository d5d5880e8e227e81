"""Rotary positions (RoFormer, arXiv:2104.09864) in the halved layout of Llama and Qwen.

For a head of size D, pair i holds elements i and i + D/2, and turns by position * theta^(-2i/D):

    x_i      ->  x_i cos - x_(i+D/2) sin
    x_(i+D/2) -> x_(i+D/2) cos + x_i sin

The angles of a pack are computed once for all its layers, and the rotation has its own backward (turn back
by the same angle): written with plain operators it is a tenth of the memory traffic of a small model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# N packed token, H head, D head size, P pair of a head (D / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosine and sine of every token's angles."""

    cos_N1P: torch.Tensor
    sin_N1P: torch.Tensor

    @classmethod
    def of(cls, positions_N: torch.Tensor, *, head_size: int, theta: float, dtype: torch.dtype) -> Rotation:
        """The angles of `positions_N`, computed in fp32 and rounded to `dtype`."""
        exponents_P = torch.arange(0, head_size, 2, device=positions_N.device).float() / head_size
        angles_NP = torch.outer(positions_N.float(), 1.0 / theta**exponents_P)
        return cls(
            cos_N1P=angles_NP.cos().unsqueeze(1).to(dtype), sin_N1P=angles_NP.sin().unsqueeze(1).to(dtype)
        )

    def turn(self, x_NHD: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys by their positions."""
        turned: torch.Tensor = _Turn.apply(x_NHD, self.cos_N1P, self.sin_N1P)  # type: ignore[no-untyped-call]
        return turned


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHD: torch.Tensor, cos_N1P: torch.Tensor, sin_N1P: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_N1P, sin_N1P)
        return _turned(x_NHD, cos_N1P, sin_N1P, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_N1P, sin_N1P = ctx.saved_tensors
        return _turned(grads[0], cos_N1P, sin_N1P, sign=-1), None, None


def _turned(x_NHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: int) -> torch.Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    out = torch.empty(x_NHD.shape, dtype=x_NHD.dtype, device=x_NHD.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out
