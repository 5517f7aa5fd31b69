"""The gate of an MLP on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.cpu.fixed_tiles import WHOLE
from penstock.model.layers.dense import GateKernel, gated


class HostGate(GateKernel):
    """PyTorch's gate; in generation a row has the same bits at any position."""

    # Their inner activations are still at hand when they are read: a quarter of the time of an MLP in int8 by FBGEMM
    # for a prompt of 1,024 tokens with weights 512 and 1,024 wide, a seventh with 2,048; nothing lost in fp32.
    rows_at_once = 256

    def gated_rows(self, gate: Tensor, up: Tensor) -> Tensor:
        # PyTorch's silu computes otherwise the last values of what lies together, where they do not fill a vector.
        if gate.shape[-1] % WHOLE and gate.is_contiguous():
            gate, up = torch.cat((gate, up), -1).chunk(2, -1)
        return self.gated(gate, up)


class ReproducibleGate(HostGate):
    """A gate that gives a value the same bits wherever it stands."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return gated(gate, up, silu_of_each)


def silu_of_each(x: Tensor) -> Tensor:
    """silu that gives a value the same bits wherever it stands.

    PyTorch's own computes the last values of a tensor, and of each thread's part, otherwise than those before them,
    where they do not fill a vector.
    """
    if x.shape[-1] % WHOLE == 0 and torch.get_num_threads() == 1:
        return F.silu(x)
    divisor = torch.neg(x).exp_().add_(1.0)
    return torch.div(x, divisor, out=divisor)
