"""Functions of the layers with explicit gradients: RMSNorm, rotary positions and the gated activation.

Explicit gradients keep fewer tensors, and take less time on a CPU, than PyTorch's chains of separate operations. Norms
and rotary tables are computed in at least fp32, whatever the model's dtype.

Shapes: N rows (tokens, or tokens times heads), D normalised width, T tokens, H heads, K width of a head.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.kv_cache import Rows
from penstock.model.sequences import Sequences
from penstock.settings import RopeKind, RopeScaling


class _RMSNormFunction(torch.autograd.Function):
    """y = x r weight, r = 1 / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y, r_N1 = _normalised(x, weight_D, eps)
        ctx.save_for_backward(x, weight_D, r_N1)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, r_N1 = ctx.saved_tensors
        x_ND = _at_least_fp32(x.reshape(-1, x.shape[-1]))
        grad_ND = _at_least_fp32(grads[0].reshape(-1, x.shape[-1]))
        weight = weight_D.to(x_ND.dtype)
        product_ND = grad_ND * x_ND
        # d r / d x_j = -r^3 x_j / D
        pull_N1 = (product_ND @ weight).unsqueeze(1).mul_(r_N1.pow(3)).div_(-x.shape[-1])
        grad_weight_D = r_N1.squeeze(1) @ product_ND
        grad_x_ND = torch.mul(grad_ND, weight, out=product_ND).mul_(r_N1).addcmul_(x_ND, pull_N1)
        return grad_x_ND.to(x.dtype).view_as(x), grad_weight_D.to(weight_D.dtype), None


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; the result has the input's dtype.

    On a GPU PyTorch's own fused kernel computes it; on a CPU the explicit gradient takes a third of PyTorch's time.

    Source: Zhang and Sennrich 2019, equation 4.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        if not torch.is_grad_enabled():
            return _normalised(x, self.weight, self.eps)[0]
        return _RMSNormFunction.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]


def _normalised(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows, and r [N, 1]."""
    x_ND = _at_least_fp32(x.reshape(-1, x.shape[-1]))
    mean_square_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    r_N1 = mean_square_N1.add_(eps).rsqrt_()
    return (x_ND * r_N1).mul_(weight_D).to(x.dtype).view(x.shape), r_N1


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


class _GatedFunction(torch.autograd.Function):
    """silu(gate) * up. Autograd alone would keep silu(gate) too, and write one more buffer each way."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_reproducible: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        return (silu_of_each(gate) if is_reproducible else F.silu(gate)).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grads[0])
        grad_gate = grads[0] * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad_up, None


def gated(gate: Tensor, up: Tensor, is_reproducible: bool = False) -> Tensor:
    """silu(gate) * up, element by element, with `silu_of_each` if asked. Source: Shazeer 2020 (SwiGLU), equation 6."""
    if not torch.is_grad_enabled():
        return (silu_of_each(gate) if is_reproducible else F.silu(gate)).mul_(up)
    return _GatedFunction.apply(gate, up, is_reproducible)  # pyright: ignore[reportReturnType]


def silu_of_each(x: Tensor) -> Tensor:
    """silu by operations that give a value the same bits wherever it stands.

    PyTorch's own computes the last values of a tensor, and of each thread's part, otherwise than those before them.
    """
    return torch.div(x, torch.neg(x).exp_().add_(1.0))


class _GatedJointFunction(torch.autograd.Function):
    """The same where one product has given gate and up side by side, and wants their gradients side by side."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(F.silu(gate), grads[0], out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def gated_joint(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the last dimension's first and second half."""
    return _GatedJointFunction.apply(gate_up)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Rotary:
    """The angle by which a position rotates each pair: element i of a head's first half and of its second half.

    The pairs are those of Hugging Face's models. Source: Su et al. 2021 (RoFormer), section 3.2.2.
    """

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
