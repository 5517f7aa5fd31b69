"""The MLP block, plain and tensor-parallel, and its gated activation, whose backward keeps its inputs alone.

Shapes: T tokens of the microbatch, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CachedRows, CacheSize, Rows
from penstock.model.layers.norm import RMSNorm
from penstock.model.layers.tensor_parallel import TensorParallelSplit, TensorParallelUnit, add_residual
from penstock.model.linear import Linear, outputs
from penstock.model.matmul import Matmul
from penstock.model.segments import Compute, Segment
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Collectives
from penstock.settings import ModelConfig


class MLPBlock(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    has_randomness = False
    has_fixed_shapes = True

    def __init__(self, config: ModelConfig, matmul: Matmul) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate = Linear(config.hidden_size, config.intermediate_size, matmul=matmul)
        self.up = Linear(config.hidden_size, config.intermediate_size, matmul=matmul)
        self.down = Linear(config.intermediate_size, config.hidden_size, matmul=matmul)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers by the input that they read; see `JointLayers`."""
        return (self.gate, self.up), (self.down,)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))

    def inner(self, h_TD: Tensor) -> Tensor:
        """The block's addend to the residual stream, from the normalised stream."""
        return self.down(gated(*outputs(h_TD, (self.gate, self.up))))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: Rows) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))


class TensorParallelMLPBlock(TensorParallelUnit, MLPBlock):
    """The MLP block for this rank's columns of the inner width."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        MLPBlock.__init__(self, split.own, matmul)
        self.collectives = Collectives(split.group)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        norm = Compute("norm", lambda x: (self.norm(x), x))
        mlp = Compute("mlp", lambda h, x: (self.inner(h), x))
        return [norm, self.gather(), mlp, self.scatter(), Compute("residual", add_residual)]

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return x_TD + self.summed(self.inner(self.norm(x_TD)))


def mlp_block(config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> MLPBlock:
    """The MLP block in the form that these groups need."""
    return MLPBlock(config, matmul) if groups.tp is None else TensorParallelMLPBlock(config, matmul, groups)


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
