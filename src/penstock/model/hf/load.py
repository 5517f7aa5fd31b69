"""Loading of stored tensors into parameters.

A parameter may consist of several stored tensors (one for each expert), and a rank may hold only a part of it. Each
stored tensor is cut to that part before it is read, so only values that are kept are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.model.hf.files import WeightFiles
from penstock.model.units import Shard, UnitSpec

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """A stored tensor, and its place in the whole parameter: an index; left out, it is all of it."""

    stored: str
    place: Index = ()

    def extents(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Where it begins and ends along each dimension of a parameter of that shape."""
        extents = [(0, size) for size in shape]
        for dim, part in enumerate(self.place):
            extents[dim] = (part, part + 1) if isinstance(part, int) else (part.start, part.stop)
        return extents

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the stored tensor, for a parameter of that shape; a dimension that the place numbers is not stored."""
        return tuple(stop - start for dim, (start, stop) in enumerate(self.extents(shape)) if not self._numbers(dim))

    def within(self, shape: tuple[int, ...], shard: Shard | None) -> tuple[tuple[slice, ...], Index] | None:
        """What to read of the stored tensor, and where in the rank's part it belongs; None where they do not meet."""
        source: list[slice] = []
        target: list[int | slice] = []
        for dim, (start, stop) in enumerate(self.extents(shape)):
            cut = shard is not None and shard.dim == dim
            first = shard.start if shard is not None and cut else 0
            end = first + shard.length if shard is not None and cut else shape[dim]
            low, high = max(start, first), min(stop, end)
            if low >= high:
                return None
            if self._numbers(dim):
                target.append(low - first)
            else:
                source.append(slice(low - start, high - start))
                target.append(slice(low - first, high - first))
        return tuple(source), tuple(target)

    def _numbers(self, dim: int) -> bool:
        return dim < len(self.place) and isinstance(self.place[dim], int)


class Names(Protocol):
    """A model's names in files: which stored tensors make up a parameter, and which are rightly left unread."""

    def pieces(self, full_name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]: ...

    def is_surplus(self, stored: str) -> bool: ...


def placed_units(units: Sequence[UnitSpec], names: Names, files: WeightFiles) -> tuple[UnitSpec, ...]:
    """The units with values from the files instead of random ones.

    Raises:
        ValueError: a tensor is missing, has another shape than its parameter, or belongs to no parameter.
    """
    _check(units, names, files)
    return tuple(replace(unit, initialise=partial(_place, unit, names, files)) for unit in units)


def whole_shapes(unit: UnitSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of a unit's whole parameters and lasting buffers, by name in the module."""
    with torch.device("meta"):
        module = unit.build()
    return {
        name: unit.sharding[name].full_shape if name in unit.sharding else tuple(tensor.shape)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def pieces_of(unit: UnitSpec, names: Names) -> Iterator[tuple[str, tuple[int, ...], tuple[Piece, ...]]]:
    """Each of a unit's tensors by name in the module, with its whole shape and its pieces; a tied one is its owner."""
    for name, shape in whole_shapes(unit).items():
        yield name, shape, names.pieces(unit.tied.get(name, unit.full_name(name)), shape)


def _check(units: Sequence[UnitSpec], names: Names, files: WeightFiles) -> None:
    """Hold names and shapes of the whole model against the files: every rank finds the same, whatever it holds."""
    unread = set(files.tensors)
    for unit in units:
        for name, shape, pieces in pieces_of(unit, names):
            for piece in pieces:
                unread.discard(piece.stored)
                stored, wanted = files.tensors.get(piece.stored), piece.shape(shape)
                if stored is None:
                    raise ValueError(f"{files.folder} lacks {piece.stored}, which is {unit.full_name(name)}")
                if stored.shape != wanted:
                    raise ValueError(
                        f"{piece.stored} in {stored.file} has the shape {list(stored.shape)}, but config.json makes it "
                        f"{list(wanted)}"
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
    found = list(pieces_of(unit, names))
    if not all(pieces for _, _, pieces in found):
        unit.initialise(module, seed)
    tensors = module.state_dict(keep_vars=True)
    for name, shape, pieces in found:
        tensor, shard = tensors[name], unit.sharding.get(name)
        target = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
        for piece in pieces:
            meeting = piece.within(shape, shard)
            if meeting is not None:
                source, place = meeting
                target[place].copy_(files.read(piece.stored, source))
        if target is not tensor:
            _register(module, name, target, tensor)


def _register(module: nn.Module, name: str, values: Tensor, before: Tensor) -> None:
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(before, nn.Parameter):
        owner.register_parameter(own, nn.Parameter(values, before.requires_grad))
    else:
        owner.register_buffer(own, values)
