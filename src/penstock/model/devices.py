"""The kernels of each device, chosen once where a module is made."""

from dataclasses import astuple

import torch
from torch import nn

from penstock.model.cpu.blocked_cache import BlockedAttention
from penstock.model.cpu.gate import host_gate
from penstock.model.cuda.flash import FlashAttention
from penstock.model.layers.dense import AttentionBlock, MLPBlock


def use_kernels_of(device: torch.device, module: nn.Module) -> None:
    """Have the module's layers compute as their device does it best; the meta device takes the paths of a GPU."""
    is_cpu = device.type == "cpu"
    if device.type == "cuda":
        # It would build a plan for each new shape of attention, which takes half a second.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.get_device_capability(device) < (8, 0):
            return  # It has no flash kernels.
    for part in module.modules():
        if isinstance(part, AttentionBlock):
            kind = BlockedAttention if is_cpu else FlashAttention
            part.attention = kind(*astuple(part.attention))
        elif isinstance(part, MLPBlock) and is_cpu:
            part.kernel = host_gate(part.gate.out_features)
