"""Rotary positions, with tables in fp32 whatever the model's dtype.

A head's first half and second half make the pairs that turn, as in Hugging Face's models.

Shapes: T tokens, H heads, K width of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model.sequences import Sequences


@dataclass(frozen=True)
class Rotary:
    """Which angle a position turns each pair by. Source: Su et al. 2021 (RoFormer), section 3.2.2."""

    head_dim: int
    theta: float

    def tables(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, K] fp32 of the given positions, made once for all layers."""
        return sequences.shared(self, lambda: self._tables(sequences.positions))

    def _tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, device=positions_T.device, dtype=torch.float32) / self.head_dim
        angles_TK = positions_T.to(torch.float32)[:, None] * self.theta**-exponents
        cos, sin = angles_TK.cos(), angles_TK.sin()
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


class _RotateFunction(torch.autograd.Function):
    """Turn every pair; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1K, sin_T1K)
        return _turn(x_THK, cos_T1K, sin_T1K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_T1K, sin_T1K = ctx.saved_tensors
        return _turn(grads[0], cos_T1K, -sin_T1K), None, None


def rotate(x_THK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys turned by their positions; computed in fp32, given back in the input's dtype."""
    return _RotateFunction.apply(x_THK, *tables)  # pyright: ignore[reportReturnType]


def _turn(x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    # An fp32 table promotes a 16-bit x; the second factor must be promoted by hand, for addcmul_ works in place.
    turned_THK = x_THK * cos_T1K
    swapped_THK = x_THK.roll(x_THK.shape[-1] // 2, -1).to(turned_THK.dtype)
    return turned_THK.addcmul_(swapped_THK, sin_T1K).to(x_THK.dtype)
