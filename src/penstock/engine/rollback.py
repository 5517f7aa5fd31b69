"""The state that a step changes before it is certain to succeed, and that is put back after one which failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.runtime import Stage


@dataclass(slots=True)
class _SavedBuffer:
    """A module's buffer: the tensor that the module has, its version, and a copy of its values."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    values: Tensor

    def save(self) -> None:
        """Copy the values if they have changed since the last copy."""
        tensor = self.module._buffers[self.name]
        if tensor is None or (tensor is self.tensor and tensor._version == self.version):
            return
        self.tensor, self.version, self.values = tensor, tensor._version, tensor.detach().clone()

    def restore(self) -> None:
        if self.tensor._version != self.version:
            self.tensor.copy_(self.values)
            self.version = self.tensor._version
        self.module._buffers[self.name] = self.tensor


class StepState:
    """Buffers of the stages' modules, such as running statistics, and the random number generators of torch."""

    def __init__(self, stages: Iterable[Stage], device: torch.device) -> None:
        self._device = device
        #: copied anew only where a step has changed them
        self._buffers = [
            _SavedBuffer(module, name, buffer, buffer._version, buffer.detach().clone())
            for stage in stages
            for _, unit in stage.units
            for module in unit.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.save()

    def save(self) -> None:
        """Note the state as it is before a step."""
        self._random = torch.get_rng_state()
        if self._device.type == "cuda":
            self._random_on_device = torch.cuda.get_rng_state(self._device)
        for buffer in self._buffers:
            buffer.save()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what `save` noted."""
        torch.set_rng_state(self._random)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_on_device, self._device)
        for buffer in self._buffers:
            buffer.restore()
