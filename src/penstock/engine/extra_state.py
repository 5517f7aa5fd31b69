"""The extra state of layers: the state beside parameters and buffers that modules declare by `get_extra_state`."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.checkpoint.manifest import CheckpointInfo
from penstock.parallel.nested import pack, tensor_forms, unpack
from penstock.runtime import Stage
from penstock.runtime.layer_state import has_extra_state
from penstock.settings.declare import words_of

_KEY = "_extra_state"
"""Ends the name of extra state in torch's state dicts."""


@dataclass(eq=False)
class ExtraState:
    """The extra state of this rank's modules, by name in the whole model's state dict.

    A checkpoint stores each value as JSON text, and the tensors in it beside that, as ``layers.1._extra_state.0``.
    """

    #: this rank's stages
    _stages: Iterable[Stage]
    #: tensors that a checkpoint is loaded into, until `load_allocated`
    _allocated: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def _modules(self) -> list[tuple[str, nn.Module, bool]]:
        """Name of extra state, its module, and True if it belongs to the first copy of a bidirectional model."""
        return [
            (".".join(filter(None, (unit_name, path, _KEY))), module, not stage.suffix)
            for stage in self._stages
            for unit_name, unit in stage.units
            for path, module in unit.named_modules()
            if has_extra_state(module)
        ]

    def values(self) -> dict[str, Any]:
        """The extra state of each module now."""
        return {name: module.get_extra_state() for name, module, is_first in self._modules if is_first}

    def take_values(self, values: Mapping[str, Any]) -> None:
        """Set the extra state of this rank's modules from copies of the values. Raises: ValueError if one refuses."""
        for name, module, _ in self._modules:
            if name in values:
                try:
                    module.set_extra_state(copy.deepcopy(values[name]))
                except Exception as error:
                    why = f"{type(error).__name__}: {words_of(error)}"
                    raise ValueError(f"{name} was not taken by its layer ({why})") from error

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint stores. Raises: ValueError for extra state that cannot be saved."""
        tensors_by_name: dict[str, Tensor] = {}
        for name, value in self.values().items():
            try:
                structure, tensors = pack(value)
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from None
            tensors_by_name[name] = torch.tensor(list(json.dumps(structure).encode()), dtype=torch.uint8)
            tensors_by_name |= {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}
        return tensors_by_name

    def allocate_for(self, checkpoint: CheckpointInfo) -> dict[str, Tensor]:
        """Empty tensors for this rank's extra state in the checkpoint, and for state that must be there."""
        names = {name for name, *_ in self._modules}
        self._allocated = {
            record.of: torch.empty(record.part.full_shape, dtype=getattr(torch, record.dtype))
            for record in checkpoint.tensors.values()
            if f"{record.of.partition(f'.{_KEY}')[0]}.{_KEY}" in names
        }
        # Older checkpoints lack modules whose extra state is empty.
        required = [name for name, value in self.values().items() if not _is_empty(value)]
        return {name: torch.empty(0, dtype=torch.uint8) for name in required} | self._allocated

    def load_allocated(self) -> None:
        """Set the extra state that was loaded into the tensors of `allocate_for`, in host memory.

        Raises: KeyError, TypeError or ValueError for contents that were never saved.
        """
        tensors_by_name, self._allocated = self._allocated, {}
        for name in tensors_by_name.keys() & {name for name, *_ in self._modules}:
            structure, tensors = json.loads(bytes(tensors_by_name[name].tolist())), list[Tensor]()
            for i, (dtype, shape) in enumerate(tensor_forms(structure)):
                tensor = tensors_by_name.get(f"{name}.{i}", torch.empty(shape, dtype=getattr(torch, dtype)))
                # Files have complex numbers as pairs.
                is_pairs = getattr(torch, dtype).is_complex and not tensor.is_complex()
                tensors.append(torch.view_as_complex(tensor) if is_pairs else tensor)
            self.take_values({name: unpack(structure, tensors)})


def _is_empty(value: Any) -> bool:
    return value.numel() == 0 if isinstance(value, Tensor) else value in (None, "", b"", (), [], {})
