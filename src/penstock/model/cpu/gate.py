"""The gate of an MLP on a CPU."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.cpu.fixed_tiles import WHOLE
from penstock.model.layers.dense import GateKernel, gated

_ROWS_AT_ONCE = 256
"""Rows whose inner activations are still at hand when they are read: a quarter of the time of an MLP in int8 by FBGEMM
for a prompt of 1,024 tokens with weights 512 and 1,024 wide, a seventh with 2,048; nothing lost in fp32."""


def host_gate(width: int, is_reproducible: bool = False) -> GateKernel:
    """The gate of an MLP that is so wide inside; in generation a row has the same bits at any position.

    is_reproducible: a value has the same bits wherever it stands, in training too.
    """
    gate = partial(gated, silu=silu_of_each) if is_reproducible else gated

    def gated_rows(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        # PyTorch's silu computes otherwise the last values of what lies together, where they do not fill a vector.
        if gate_TI.is_contiguous():
            gate_TI, up_TI = torch.cat((gate_TI, up_TI), -1).chunk(2, -1)
        return gate(gate_TI, up_TI)

    return GateKernel(gate, gated_rows if width % WHOLE else gate, _ROWS_AT_ONCE)


def silu_of_each(x: Tensor) -> Tensor:
    """silu that gives a value the same bits wherever it stands.

    PyTorch's own computes the last values of a tensor, and of each thread's part, otherwise than those before them,
    where they do not fill a vector.
    """
    if x.shape[-1] % WHOLE == 0 and torch.get_num_threads() == 1:
        return F.silu(x)
    divisor = torch.neg(x).exp_().add_(1.0)
    return torch.div(x, divisor, out=divisor)
