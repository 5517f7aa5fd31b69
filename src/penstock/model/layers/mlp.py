"""The gated activation of the MLP, silu(gate) * up, which keeps its inputs and nothing else."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _GatedFunction(torch.autograd.Function):
    """silu(gate) * up. Autograd alone would keep silu(gate) too, and write one more buffer each way."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grads[0])
        grad_gate = grads[0] * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad_up


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element. Source: Shazeer 2020 (SwiGLU), equation 6."""
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    return _GatedFunction.apply(gate, up)  # pyright: ignore[reportReturnType]


class _GatedHalvesFunction(torch.autograd.Function):
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


def gated_halves(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the last dimension's first and second half."""
    return _GatedHalvesFunction.apply(gate_up)  # pyright: ignore[reportReturnType]
