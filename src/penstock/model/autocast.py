"""Questions to autocast, which PyTorch answers for some kinds of device; on others, such as "meta", it is off."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes on the tensor's device; None where it is off."""
    device = x.device.type
    if not is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_to(x: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """A context in which autocast computes in that dtype on the tensor's device; None turns it off."""
    device = x.device.type
    if not is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, dtype or torch.get_autocast_dtype(device), dtype is not None)
