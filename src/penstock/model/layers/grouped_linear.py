"""The grouped linear layer: one stacked weight for many experts, and the grouped matrix products that compute it.

Rows are sorted by expert, so each expert works on a run of neighbouring rows; no row is padded and none is dropped. The
weight gradient can be deferred as in `penstock.model.linear`. Deferred or not, it is added to the parameter's gradient
expert by expert and never stored as a tensor of its own: with few rows for many experts, writing it out and adding it
would take longer than the product.

Shapes: N rows of all experts, E experts of this rank, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.linear import TORCH, Matmul, PendingGradient, WeightGradients, autocast_dtype

ReadCounts = Callable[..., Sequence[int]]
"""From a number of rows, and tensors with the numbers of them that belong together, to the latter's values in a row."""


def read_counts(num_rows: int, *counts: Tensor) -> Sequence[int]:
    """Read how the rows are divided: all at once, because the host waits for the device each time."""
    return torch.cat([numbers.flatten() for numbers in counts]).tolist()


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The number of rows of each expert, where rows are sorted by expert: on the device, and on the host if asked for.

    Args:
        counts_E: int64, rows of each expert.
        num_rows: rows of all.
        read: brings the counts to the host.
    """

    counts_E: Tensor
    num_rows: int
    read: ReadCounts = read_counts

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The counts on the host, which waits for the device to read them."""
        return self.read(self.num_rows, self.counts_E)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, row after its last) of each expert that has rows."""
        for expert, (size, end) in enumerate(zip(self.sizes, accumulate(self.sizes), strict=True)):
            if size:
                yield expert, end - size, end

    @cached_property
    def ends(self) -> Tensor:
        """The row after each expert's last, [E] int32."""
        return self.counts_E.cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class GroupedMatmul:
    """The products of a grouped linear layer and its gradients, one for each expert that has rows.

    A subclass computes them in another way.
    """

    matmul: Matmul = TORCH

    def output(self, x_NI: Tensor, weight_EOI: Tensor, groups: RowGroups) -> Tensor:
        out_NO = x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])
        for expert, first, end in groups.ranges():
            # Copied expert by expert, while the result is still in the cache.
            out_NO[first:end] = self.matmul.output(x_NI[first:end], weight_EOI[expert].to(x_NI.dtype), None)
        return out_NO

    def input_gradient(self, grad_NO: Tensor, weight_EOI: Tensor, groups: RowGroups) -> Tensor:
        grad_NI = grad_NO.new_empty(grad_NO.shape[0], weight_EOI.shape[2])
        for expert, first, end in groups.ranges():
            weight_OI = weight_EOI[expert].to(grad_NO.dtype)
            grad_NI[first:end] = self.matmul.input_gradient(grad_NO[first:end], weight_OI)
        return grad_NI

    def add_weight_gradient(self, total_EOI: Tensor, grad_NO: Tensor, x_NI: Tensor, groups: RowGroups) -> None:
        for expert, first, end in groups.ranges():
            total_EOI[expert].add_(self.matmul.weight_gradient(grad_NO[first:end], x_NI[first:end]))


@dataclass(frozen=True)
class GroupedMatmulKernel(GroupedMatmul):
    """PyTorch's grouped product, one kernel for all experts: bfloat16 on a GPU, with widths in whole 16 bytes."""

    @staticmethod
    def takes(x: Tensor, weight_EOI: Tensor) -> bool:
        whole = all(size % 8 == 0 for size in weight_EOI.shape[1:])
        return x.device.type != "cpu" and x.dtype is torch.bfloat16 and whole and x.shape[0] > 0

    def output(self, x_NI: Tensor, weight_EOI: Tensor, groups: RowGroups) -> Tensor:
        if not self.takes(x_NI, weight_EOI):
            return super().output(x_NI, weight_EOI, groups)
        return F.grouped_mm(x_NI, weight_EOI.to(x_NI.dtype).transpose(1, 2), offs=groups.ends)

    def input_gradient(self, grad_NO: Tensor, weight_EOI: Tensor, groups: RowGroups) -> Tensor:
        if not self.takes(grad_NO, weight_EOI):
            return super().input_gradient(grad_NO, weight_EOI, groups)
        return F.grouped_mm(grad_NO, weight_EOI.to(grad_NO.dtype), offs=groups.ends)

    def add_weight_gradient(self, total_EOI: Tensor, grad_NO: Tensor, x_NI: Tensor, groups: RowGroups) -> None:
        if not self.takes(grad_NO, total_EOI):
            super().add_weight_gradient(total_EOI, grad_NO, x_NI, groups)
            return
        grad_EOI = F.grouped_mm(grad_NO.t(), x_NI, offs=groups.ends)
        # Some GPU kernels leave the memory of experts without rows uninitialised (PyTorch issue 172439).
        total_EOI.add_(grad_EOI.masked_fill_((groups.counts_E == 0)[:, None, None], 0))


def grouped_matmul(matmul: Matmul) -> GroupedMatmul:
    """Choose one kernel for all experts if this PyTorch has it, else `matmul` for each of them."""
    return GroupedMatmulKernel(matmul) if hasattr(F, "grouped_mm") else GroupedMatmul(matmul)


@dataclass(frozen=True, eq=False)
class PendingGroupedGradient(PendingGradient):
    """The weight gradient of one use of a grouped layer; `compute` adds it to the parameter's gradient itself."""

    layer: "GroupedLinear"
    groups: RowGroups

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield nothing: no gradient is left for the caller to add."""
        weight = self.layer.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        self.layer.matmul.add_weight_gradient(weight.grad, self.grad_TO, self.x_TI, self.groups)
        yield from ()


class _GroupedLinearFunction(torch.autograd.Function):
    """Each row times its expert's weight. The weight gradient bypasses autograd; see the head of the file."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_EOI: Tensor, layer: "GroupedLinear", groups: RowGroups) -> Tensor:
        ctx.save_for_backward(x_NI, weight_EOI)
        ctx.layer, ctx.groups = layer, groups
        return layer.matmul.output(x_NI, weight_EOI, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad_NO,), (x_NI, weight_EOI), layer = grads, ctx.saved_tensors, ctx.layer
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_NI = layer.matmul.input_gradient(grad_NO, weight_EOI, ctx.groups) if needs_x else None
        if needs_weight:
            pending = PendingGroupedGradient(None, None, x_NI, grad_NO, TORCH, layer, ctx.groups)
            if layer.gradients is not None and layer.gradients.queue is not None:
                layer.gradients.queue.append(pending)
            else:
                WeightGradients.drain([pending])
        return grad_NI, None, None, None


class GroupedLinear(nn.Module):
    """A linear layer without bias for each expert, in one parameter [E, O, I]; `defer` attaches the owner."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, matmul: GroupedMatmul) -> None:
        super().__init__()
        self.gradients: WeightGradients | None = None
        self.matmul = matmul
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x_NI: Tensor, groups: RowGroups) -> Tensor:
        """Rows sorted by expert -> their outputs, in the same order."""
        if (dtype := autocast_dtype(x_NI)) is not None and x_NI.dtype != torch.float64:
            x_NI = x_NI.to(dtype)
        return _GroupedLinearFunction.apply(x_NI, self.weight, self, groups)  # pyright: ignore[reportReturnType]
