"""The state that a step changes before it is certain to succeed, and that is put back after one which failed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.runtime import Stage


class StepState:
    """Buffers of the stages' modules, such as running statistics, and the random number generators of torch."""

    #: the device whose random numbers count beside the host's
    _device: torch.device
    #: modules with their buffers' names, in one order
    _places: list[tuple[nn.Module, str]]
    #: by place: the tensor that the module had before the step, and its values
    _tensors: list[Tensor]
    _values: list[Tensor]

    def __init__(self, stages: Iterable[Stage], device: torch.device) -> None:
        self._device = device
        self._places = [
            (module, name)
            for stage in stages
            for _, unit in stage.units
            for module in unit.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._tensors, self._values = [], []
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        """Note the state as it is before a step."""
        self._random = torch.get_rng_state()
        if self._device.type == "cuda":
            self._random_on_device = torch.cuda.get_rng_state(self._device)
        # Whether values have changed cannot be asked: batch normalisation leaves a tensor's version as it is.
        tensors = [tensor for module, name in self._places if (tensor := module._buffers.get(name)) is not None]
        if any(tensor is not known for tensor, known in itertools.zip_longest(tensors, self._tensors)):
            self._places = [place for place in self._places if place[0]._buffers.get(place[1]) is not None]
            self._tensors, self._values = tensors, [tensor.clone() for tensor in tensors]
        elif tensors:
            torch._foreach_copy_(self._values, self._tensors)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what `save` noted."""
        torch.set_rng_state(self._random)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_on_device, self._device)
        for (module, name), tensor, values in zip(self._places, self._tensors, self._values, strict=True):
            tensor.copy_(values)
            module._buffers[name] = tensor
