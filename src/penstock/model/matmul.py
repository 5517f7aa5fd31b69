"""The three matrix products of a linear layer, and the library that computes them.

PyTorch gives fp32 products on CPUs to MKL, which runs AVX2 code on CPUs that are not Intel's. oneDNN, which PyTorch
carries too, uses AVX-512 wherever it is: on an AMD Zen 5 core 240 GFLOP/s against 107 (`python benchmarks/units.py`).

Shapes: T tokens, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 8
"""For how many rows an order is chosen; it serves any other number as well."""


class Products(Protocol):
    """One way to compute a linear layer and its gradients.

    Gradients take and give matrices; the output keeps what leading dimensions there are. `packed` gives weights one
    below the other in an order of its own, which only `output` understands, where that is faster; else None.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor: ...

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor: ...

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor: ...

    def packed(self, weights_OI: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None: ...


@dataclass(frozen=True)
class TorchProducts:
    """The products that `nn.Linear` and autograd compute, bit for bit."""

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x, weight_OI, bias_O)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return grad_TO @ weight_OI

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        return grad_TO.t() @ x_TI

    def packed(self, weights_OI: Sequence[Tensor], dtype: torch.dtype) -> None:
        return None


@dataclass(frozen=True)
class OneDnnProducts:
    """The same products by oneDNN where it is faster, which is fp32 on a CPU; elsewhere those of `TorchProducts`.

    oneDNN reads transposed operands in place, and its bits depend on shapes alone, not on addresses. Those of an
    output's row depend on that row alone: only a single row would be computed otherwise, so it is computed twice.
    Where there are few rows most of the time goes into reading weights, which packed ones halve; their bits are the
    same.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if not _is_fp32_on_cpu(x):
            return TORCH.output(x, weight_OI, bias_O)
        if x.shape[:-1].numel() == 1:
            return _onednn(x.view(1, -1).expand(2, -1), weight_OI, bias_O)[0].view(*x.shape[:-1], -1)
        return _onednn(x, weight_OI, bias_O)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return _onednn(grad_TO, weight_OI.t()) if _is_fp32_on_cpu(grad_TO) else TORCH.input_gradient(grad_TO, weight_OI)

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        return _onednn(grad_TO.t(), x_TI.t()) if _is_fp32_on_cpu(grad_TO) else TORCH.weight_gradient(grad_TO, x_TI)

    def packed(self, weights_OI: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
        if dtype is not torch.float32 or not all(_is_fp32_on_cpu(weight_OI) for weight_OI in weights_OI):
            return None
        joint_OI = weights_OI[0] if len(weights_OI) == 1 else torch.cat(tuple(weights_OI))
        return torch.ops.mkldnn._reorder_linear_weight(joint_OI.detach(), _FEW_ROWS)


TORCH = TorchProducts()


def fastest_products() -> Products:
    """oneDNN's products where this build of PyTorch carries them, else PyTorch's own choice."""
    return OneDnnProducts() if hasattr(torch.ops.mkldnn, "_linear_pointwise") else TORCH


def _is_fp32_on_cpu(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu"


def _onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
