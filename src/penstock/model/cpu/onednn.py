"""oneDNN's matrix products for linear layers on a CPU, and weights packed for them.

Shapes: T tokens (all leading dimensions together), I inputs, O outputs.
"""

from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from penstock.model.linear import TORCH, Matmul, PackedWeights

_FEW_ROWS = 8
"""The number of rows for which a packed order is chosen; it serves any other number as well."""

_NOTHING_MORE = ("none", [], "")
"""oneDNN computes no other operation after the product."""


@dataclass(frozen=True)
class OneDnnMatmul(Matmul):
    """oneDNN's products on a CPU: outputs in fp32 and bf16, gradients in fp32; elsewhere PyTorch's choice.

    oneDNN reads transposed operands in place, and its bits depend only on shapes, not on addresses. With few rows most
    of the time goes into reading weights. Packing halves that, and the bits stay the same.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if not _has_onednn(x):
            return super().output(x, weight_OI, bias_O)
        if x.shape[:-1].numel() != 1:
            return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, *_NOTHING_MORE)
        # A single row would be computed differently, so it is computed twice.
        twice = x.reshape(1, -1).repeat(2, 1)
        return torch.ops.mkldnn._linear_pointwise(twice, weight_OI, bias_O, *_NOTHING_MORE)[0].view(*x.shape[:-1], -1)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        if grad_TO.dtype is not torch.float32 or grad_TO.device.type != "cpu":
            return super().input_gradient(grad_TO, weight_OI)
        return torch.ops.mkldnn._linear_pointwise(grad_TO, weight_OI.t(), None, *_NOTHING_MORE)

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        # oneDNN refuses sums of no rows, which a rank without tokens has.
        if grad_TO.dtype is not torch.float32 or grad_TO.device.type != "cpu" or not len(grad_TO):
            return super().weight_gradient(grad_TO, x_TI)
        return torch.ops.mkldnn._linear_pointwise(grad_TO.t(), x_TI.t(), None, *_NOTHING_MORE)

    def is_torchs(self, x: Tensor) -> bool:
        return x.device.type != "cpu"

    def has_apart_rows(self, weight_OI: Tensor) -> bool:
        return _has_onednn(weight_OI) and _rows_are_apart(self, weight_OI.dtype)

    def packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeights | None:
        if not _has_onednn(weight_OI):
            return None
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _FEW_ROWS)
        product = partial(torch.ops.mkldnn._linear_pointwise, W=packed, B=bias_O, attr="none", scalars=[], algorithm="")
        return PackedWeights.of(product, packed, bias_O, takes_one_row=False)


@dataclass(frozen=True)
class PaddedMatmul(OneDnnMatmul):
    """`OneDnnMatmul`, but outputs in fp32 are PyTorch's own choice, of whole fours of rows.

    For releases whose oneDNN adds up a row in an order that depends on the number of rows, as 3.10 does on processors
    without AVX-512.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            return super().output(x, weight_OI, bias_O)
        num_rows = x.shape[:-1].numel()
        if num_rows % 4 == 0:
            return F.linear(x, weight_OI, bias_O)
        padded_TI = F.pad(x.reshape(num_rows, -1), (0, 0, 0, -num_rows % 4))
        return F.linear(padded_TI, weight_OI, bias_O)[:num_rows].view(*x.shape[:-1], -1)

    def packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeights | None:
        return None if weight_OI.dtype is torch.float32 else super().packed(weight_OI, bias_O)


def fastest_matmul() -> Matmul:
    """oneDNN's products if this build of PyTorch has them, else PyTorch's own choice."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return TORCH
    onednn, padded = OneDnnMatmul(), PaddedMatmul()
    return next((own for own in (onednn, padded) if _rows_are_apart(own, torch.float32)), onednn)


@cache
def _rows_are_apart(matmul: Matmul, dtype: torch.dtype) -> bool:
    """True if a row of the output has the same bits among any number of rows, as this release and processor compute."""
    generator = torch.Generator("cpu").manual_seed(0)
    # A layer may be made where tensors have no data.
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        x_TI, weight_OI = (torch.randn(size, 64, generator=generator, device="cpu").to(dtype) for size in (40, 48))
        whole_TO = matmul.output(x_TI, weight_OI, None)
        return all(torch.equal(matmul.output(x_TI[:n], weight_OI, None), whole_TO[:n]) for n in range(1, len(x_TI)))


def _has_onednn(x: Tensor) -> bool:
    """True where oneDNN computes outputs in that dtype on that device."""
    return x.device.type == "cpu" and (
        x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
