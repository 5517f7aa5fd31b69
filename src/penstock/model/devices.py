"""The kernels of each device, chosen once where a module is made."""

from dataclasses import astuple

import torch
from torch import nn

from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cpu.blocked_cache import BlockedAttention
from penstock.model.layers.dense import AttentionBlock

ATTENTION: dict[str, type[AttentionKernel]] = {"cpu": BlockedAttention}
"""Type of device -> attention there; elsewhere PyTorch's own."""


def use_kernels_of(device: torch.device, module: nn.Module) -> None:
    """Have the module's layers compute as their device does it best."""
    kernel = ATTENTION.get(device.type, AttentionKernel)
    for part in module.modules():
        if isinstance(part, AttentionBlock):
            part.attention = kernel(*astuple(part.attention))
