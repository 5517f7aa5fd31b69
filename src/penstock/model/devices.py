"""The kernels of each device, chosen once where a module is made."""

from dataclasses import astuple

import torch
from torch import nn

from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cpu.blocked_cache import BlockedAttention
from penstock.model.cpu.gate import HostGate
from penstock.model.layers.dense import AttentionBlock, GateKernel, MLPBlock

KERNELS: dict[str, tuple[type[AttentionKernel], GateKernel]] = {"cpu": (BlockedAttention, HostGate())}
"""Type of device -> attention and the MLP's gate there; elsewhere they are PyTorch's own."""


def use_kernels_of(device: torch.device, module: nn.Module) -> None:
    """Have the module's layers compute as their device does it best."""
    attention, gate = KERNELS.get(device.type, (AttentionKernel, GateKernel()))
    for part in module.modules():
        if isinstance(part, AttentionBlock):
            part.attention = attention(*astuple(part.attention))
        elif isinstance(part, MLPBlock):
            part.kernel = gate
