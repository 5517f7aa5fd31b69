"""The kernels of each device, chosen once where a module is made."""

from dataclasses import astuple

import torch
from torch import nn

from penstock.model.cpu.blocked_cache import BlockedAttention
from penstock.model.cpu.gate import host_gate
from penstock.model.layers.dense import AttentionBlock, MLPBlock


def use_kernels_of(device: torch.device, module: nn.Module) -> None:
    """Have the module's layers compute as their device does it best; elsewhere than on a CPU, PyTorch's own do."""
    for part in module.modules() if device.type == "cpu" else ():
        if isinstance(part, AttentionBlock):
            part.attention = BlockedAttention(*astuple(part.attention))
        elif isinstance(part, MLPBlock):
            part.kernel = host_gate(part.gate.out_features)
