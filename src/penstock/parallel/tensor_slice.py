"""Slices of tensors: the elements of a parameter that a rank, a checkpoint or a model's file has.

Checkpoints, ZeRO, and the import and export of Hugging Face files all cut and join tensors with these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
Indices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorSlice:
    """Consecutive indices along every dimension of a tensor."""

    #: the first index along each dimension
    start: Shape
    #: the number of indices along each dimension
    shape: Shape
    #: the shape of the whole tensor
    full_shape: Shape

    @classmethod
    def whole(cls, full_shape: Sequence[int]) -> TensorSlice:
        return cls((0,) * len(full_shape), tuple(full_shape), tuple(full_shape))

    @classmethod
    def at(cls, full_shape: Shape, *index: int | slice) -> TensorSlice:
        """The elements at an index; a dimension that is indexed by a number gets the length one.

        Example:
            >>> print(TensorSlice.at((8, 6), 3, slice(2, 4)))
            [3:4,2:4]
        """
        ranges = [range(i, i + 1) if isinstance(i, int) else range(i.start, i.stop) for i in index]
        ranges += [range(size) for size in full_shape[len(index) :]]
        return cls(tuple(r.start for r in ranges), tuple(map(len, ranges)), full_shape)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.full_shape

    def of(self, whole: Tensor) -> Tensor:
        """These elements of the whole tensor, as a view."""
        return whole[self.within(TensorSlice.whole(self.full_shape))]

    def overlap(self, other: TensorSlice) -> TensorSlice | None:
        """The elements of both slices; None if there are none."""
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        shape = tuple(end - first for end, first in zip(ends, start, strict=True))
        return TensorSlice(start, shape, self.full_shape) if all(n > 0 for n in shape) else None

    def within(self, outer: TensorSlice) -> Indices:
        """The indices of this slice, counted from the start of another that contains it."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.start, self.shape, outer.start, strict=True))

    def run(self, first: int, last: int) -> Iterator[TensorSlice]:
        """Cut out elements `first` ... `last - 1` of this slice, counted row by row, in as few slices as possible."""
        for start, shape in _boxes(first, last, self.shape):
            yield TensorSlice(tuple(a + b for a, b in zip(self.start, start, strict=True)), shape, self.full_shape)

    def __str__(self) -> str:
        return f"[{','.join(f'{a}:{a + n}' for a, n in zip(self.start, self.shape, strict=True))}]"


LocalTensor = Tensor | Mapping[TensorSlice, Tensor]
"""A rank's elements of a tensor: all of them, or slices that do not overlap, each with its values as a view."""


def laid_out(tensor: Tensor) -> Tensor:
    """The values in one piece of memory, each as it reads; the tensor itself, if that is how it has them.

    torch conjugates and negates some views by a mark alone, which bytes do not have.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def local_slices(local: LocalTensor) -> Mapping[TensorSlice, Tensor]:
    """A rank's elements as slices, also where it has the whole tensor; complex ones as pairs of reals, [..., 2].

    All are views, of a tensor that is conjugated by a mark one of real parts and one of imaginary ones.
    """
    slices = {TensorSlice.whole(local.shape): local.detach()} if isinstance(local, Tensor) else local
    real_slices = {}
    for part, tensor in slices.items():
        if tensor.is_complex():
            # No file format holds all of them.
            views = (
                [tensor.real[..., None], tensor.imag[..., None]] if tensor.is_conj() else [torch.view_as_real(tensor)]
            )
            for place, view in enumerate(views):
                real_slices[TensorSlice((*part.start, place), tuple(view.shape), (*part.full_shape, 2))] = view
        else:
            real_slices[part] = tensor
    return real_slices


def local_run(flat: Tensor, first: int, outer: TensorSlice) -> LocalTensor:
    """View a flat tensor as the elements of `outer`, counted row by row, from number `first` on."""
    if flat.numel() == outer.num_elements and outer.is_whole:
        return flat.view(outer.full_shape)
    local, position = {}, 0
    for part in outer.run(first, first + flat.numel()):
        local[part] = flat[position : position + part.num_elements].view(part.shape)
        position += part.num_elements
    return local


@dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter that ranks share: one of `count` consecutive parts along one dimension.

    If `count` does not divide the dimension, the first parts are longer by one; none is padded. If there are fewer
    parts than ranks, neighbouring ranks hold the same part.
    """

    #: the kind of ranks that share it: those that share layers, or experts
    axis: Literal["tp", "ep"]
    #: the dimension that is cut
    dim: int
    #: the number of this rank's part
    index: int
    #: the number of parts
    count: int
    #: the shape of the whole parameter
    full_shape: Shape

    @property
    def part(self) -> TensorSlice:
        """This rank's elements of the parameter."""
        whole, longer = divmod(self.full_shape[self.dim], self.count)
        start = self.index * whole + min(self.index, longer)
        along_dim = slice(start, start + whole + (self.index < longer))
        return TensorSlice.at(self.full_shape, *(slice(0, size) for size in self.full_shape[: self.dim]), along_dim)

    @property
    def start(self) -> int:
        """The index along `dim` at which the part begins."""
        return self.part.start[self.dim]

    @property
    def length(self) -> int:
        """The part's length along `dim`."""
        return self.part.shape[self.dim]

    def of(self, whole: Tensor) -> Tensor:
        """The part of the whole parameter, or of its gradient or optimizer state, as a view."""
        return self.part.of(whole)

    def on(self, rank: int, num_ranks: int) -> Shard:
        """The shard of another of the ranks that share the parameter."""
        return replace(self, index=rank * self.count // num_ranks)


@dataclass(frozen=True)
class StoredSlice:
    """A tensor in a file that is a slice of a parameter, or all of it."""

    #: the tensor's name in the file
    name: str
    #: the elements of the parameter that it has
    part: TensorSlice
    #: the number of the parameter's first dimensions that it lacks, each of length one in `part`: files store experts'
    #: matrices separately, where the parameter stacks those of all experts
    num_dropped: int = 0

    @classmethod
    def at(cls, name: str, full_shape: Shape, *index: int | slice) -> StoredSlice:
        """The stored tensor of that name, at an index of the parameter; it lacks dimensions indexed by numbers."""
        return cls(name, TensorSlice.at(full_shape, *index), sum(isinstance(i, int) for i in index))

    @property
    def shape(self) -> Shape:
        """The stored tensor's own shape."""
        return self.part.shape[self.num_dropped :]


def copies(stored: Iterable[StoredSlice], target: TensorSlice, into: Tensor) -> Iterator[tuple[str, Indices, Tensor]]:
    """Find the parts of stored tensors to read to fill `into`, which has the elements of `target`.

    Yields the stored tensor's name, the indices to read of it, and the view of `into` to copy them to.
    """
    for source in stored:
        common = source.part.overlap(target)
        if common is not None:
            yield source.name, common.within(source.part)[source.num_dropped :], into[common.within(target)]


def _boxes(first: int, last: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yield start and shape of the slices that make up elements `first` ... `last - 1` of a tensor, in order."""
    if first >= last:
        return
    if len(shape) <= 1:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    width = math.prod(shape[1:])
    (row, offset), (last_row, rest) = divmod(first, width), divmod(last, width)
    if offset and row == last_row:
        yield from _in_row(row, offset, rest, shape)
        return
    if offset:
        yield from _in_row(row, offset, width, shape)
        row += 1
    if row < last_row:
        yield (row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])
    yield from _in_row(last_row, 0, rest, shape)


def _in_row(row: int, first: int, last: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    return (((row, *start), (1, *box)) for start, box in _boxes(first, last, shape[1:]))
