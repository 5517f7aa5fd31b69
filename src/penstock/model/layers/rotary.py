"""Rotary positions, with fp32 tables whatever the model's dtype.

Element i of a head's first half and element i of its second half form a pair that is rotated, as in Hugging Face's
models.

Shapes: T tokens, H heads, K width of a head.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model.kv_cache import Rows
from penstock.model.sequences import Sequences
from penstock.settings import RopeKind, RopeScaling


@dataclass(frozen=True)
class Rotary:
    """The angle by which a position rotates each pair. Source: Su et al. 2021 (RoFormer), section 3.2.2."""

    head_dim: int
    theta: float
    scaling: RopeScaling = RopeScaling()

    def tables(self, sequences: Sequences | Rows) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, K] in fp32 of the positions, computed once for all layers."""
        return sequences.shared(self, lambda: self._tables(sequences.positions))

    def _tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        angles_TK = positions_T.to(torch.float32)[:, None] * self._frequencies(positions_T.device)
        factor = self.scaling.table_factor
        cos, sin = angles_TK.cos() * factor, angles_TK.sin() * factor
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def _frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair [K / 2], in fp32 and in Hugging Face's order of operations.

        Far into a text the last bit of a frequency changes the angle visibly, and imported models were trained with
        these.
        """
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.scaling.kind is RopeKind.NONE:
            return frequencies
        stretch = {RopeKind.LINEAR: _linear, RopeKind.LLAMA3: _llama3, RopeKind.YARN: _yarn}[self.scaling.kind]
        return stretch(self, self.scaling, frequencies)


def _linear(rotary: Rotary, scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Divide every frequency. Source: Chen et al. 2023 (position interpolation), equation 4."""
    return frequencies / scaling.factor


def _llama3(rotary: Rotary, scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Divide frequencies below `low` turns over the original length, keep those above `high`, interpolate between.

    Source: Llama 3.1's published inference code, `apply_scaling`.
    """
    turns = _length(scaling) / (2 * math.pi / frequencies)
    kept = ((turns - scaling.low) / (scaling.upper - scaling.low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(rotary: Rotary, scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Keep the fastest pairs' frequencies, divide the slowest pairs', interpolate along a ramp over the pairs between.

    Source: Peng et al. 2023 (YaRN), section 3.2, definition 2.
    """

    def pair_of(turns: float) -> float:
        wavelengths = _length(scaling) / (turns * 2 * math.pi)
        return rotary.head_dim * math.log(wavelengths) / (2 * math.log(rotary.theta))

    first, last = pair_of(scaling.upper), pair_of(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.head_dim - 1)
    pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    # If both ends are the same pair, the ramp is a step.
    divided = ((pairs - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)


def _length(scaling: RopeScaling) -> int:
    assert scaling.original_length is not None
    return scaling.original_length


class _RotateFunction(torch.autograd.Function):
    """Rotate every pair; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1K, sin_T1K)
        return _turn(x_THK, cos_T1K, sin_T1K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_T1K, sin_T1K = ctx.saved_tensors
        return _turn(grads[0], cos_T1K, -sin_T1K), None, None


def rotate(x_THK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys rotated by their positions, computed in fp32 and returned in the input's dtype."""
    if not torch.is_grad_enabled():
        return _turn(x_THK, *tables)
    return _RotateFunction.apply(x_THK, *tables)  # pyright: ignore[reportReturnType]


def _turn(x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    # An fp32 table promotes a 16-bit x; addcmul_ works in place, so its factor must be promoted explicitly.
    turned_THK = x_THK * cos_T1K
    swapped_THK = x_THK.roll(x_THK.shape[-1] // 2, -1).to(turned_THK.dtype)
    return turned_THK.addcmul_(swapped_THK, sin_T1K).to(x_THK.dtype)
