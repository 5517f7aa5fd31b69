"""Loading of stored tensors into parameters.

A parameter may consist of several stored tensors (one for each expert), and a rank may hold only a part of it. Each
stored tensor is cut to that part before it is read, so only values that are kept are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.model.hf.files import WeightFiles
from penstock.model.units import UnitSpec
from penstock.parallel.tensor_slice import Shape, StoredSlice, TensorSlice, copies


class Names(Protocol):
    """A model's names in files: which stored tensors make up a parameter, and which are rightly left unread."""

    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]: ...

    def is_surplus(self, stored: str) -> bool: ...


def placed_units(units: Sequence[UnitSpec], names: Names, files: WeightFiles) -> tuple[UnitSpec, ...]:
    """The units with values from the files instead of random ones.

    Raises:
        ValueError: a tensor is missing, has another shape than its parameter, or belongs to no parameter.
    """
    _check(units, names, files)
    return tuple(replace(unit, initialise=partial(_place, unit, names, files)) for unit in units)


def whole_shapes(unit: UnitSpec) -> dict[str, Shape]:
    """The shapes of a unit's whole parameters and lasting buffers, by name in the module."""
    with torch.device("meta"):
        module = unit.build()
    return {
        name: unit.sharding[name].full_shape if name in unit.sharding else tuple(tensor.shape)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def slices_of(unit: UnitSpec, names: Names) -> Iterator[tuple[str, Shape, tuple[StoredSlice, ...]]]:
    """Yield each tensor of a unit: its name in the module, its whole shape and its stored slices."""
    for name, shape in whole_shapes(unit).items():
        yield name, shape, names.slices(unit.tied.get(name, unit.full_name(name)), shape)


def _check(units: Sequence[UnitSpec], names: Names, files: WeightFiles) -> None:
    """Hold names and shapes of the whole model against the files: every rank finds the same, whatever it holds."""
    unread = set(files.tensors)
    for unit in units:
        for name, _, slices in slices_of(unit, names):
            for wanted in slices:
                unread.discard(wanted.name)
                stored = files.tensors.get(wanted.name)
                if stored is None:
                    raise ValueError(f"{files.folder} lacks {wanted.name}, which is {unit.full_name(name)}")
                if stored.shape != wanted.shape:
                    raise ValueError(
                        f"{wanted.name} in {stored.file} has the shape {list(stored.shape)}, but config.json makes it "
                        f"{list(wanted.shape)}"
                    )
    strangers = sorted(stored for stored in unread if not names.is_surplus(stored))
    if strangers:
        raise ValueError(
            f"{files.folder} holds {len(strangers)} tensors that the model of its config.json has not, "
            f"{strangers[0]} for one"
        )


@torch.no_grad()
def _place(unit: UnitSpec, names: Names, files: WeightFiles, module: nn.Module, seed: int) -> None:
    """Give a unit's parameters and lasting buffers their stored values, one at a time; meta ones become real.

    What the files have no place for begins as in a fresh model.
    """
    found = list(slices_of(unit, names))
    if not all(stored for _, _, stored in found):
        unit.initialise(module, seed)
    tensors = module.state_dict(keep_vars=True)
    for name, shape, stored in found:
        tensor = tensors[name]
        part = unit.sharding[name].part if name in unit.sharding else TensorSlice.whole(shape)
        target = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
        for name_in_file, indices, into in copies(stored, part, target):
            into.copy_(files.read(name_in_file, indices))
        if target is not tensor:
            _register(module, name, target, tensor)


def _register(module: nn.Module, name: str, values: Tensor, before: Tensor) -> None:
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(before, nn.Parameter):
        owner.register_parameter(own, nn.Parameter(values, before.requires_grad))
    else:
        owner.register_buffer(own, values)
