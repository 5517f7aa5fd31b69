"""Parts of tensors that ranks share out: boxes, and what a stretch of a flat tensor is in terms of boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Consecutive indices along every dimension: from `start` on, `shape` of them."""

    start: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def moved(self, offset: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.start, offset, strict=True)), self.shape)

    def common(self, other: Box) -> Box | None:
        """What lies in both; None for nothing."""
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        shape = tuple(end - first for end, first in zip(ends, start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """The indices of this box, counted from the other's start."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.start, self.shape, other.start, strict=True))

    def __str__(self) -> str:
        return f"[{','.join(f'{a}:{a + n}' for a, n in zip(self.start, self.shape, strict=True))}]"


@dataclass(frozen=True, eq=False)
class Part:
    """A box of a tensor of `full_shape` that this rank holds, as a view of the box's shape."""

    tensor: Tensor
    box: Box
    full_shape: Shape


Held = Tensor | tuple[Part, ...]
"""What a rank holds of a tensor: all of it, or parts that do not overlap."""


def parts_of(held: Held) -> tuple[Part, ...]:
    """Whatever is held, as parts."""
    if isinstance(held, Tensor):
        return (Part(held.detach(), Box.whole(held.shape), tuple(held.shape)),)
    return held


def hold(flat: Tensor, first: int, outer: Box, full_shape: Shape) -> Held:
    """What a flat tensor is: elements of the box `outer` of a tensor of `full_shape`, row by row, from `first` on."""
    if flat.numel() == outer.num_elements and outer.shape == full_shape:
        return flat.view(full_shape)
    parts, position = [], 0
    for box in stretch(first, first + flat.numel(), outer.shape):
        view = flat[position : position + box.num_elements].view(box.shape)
        parts.append(Part(view, box.moved(outer.start), full_shape))
        position += box.num_elements
    return tuple(parts)


def stretch(first: int, last: int, shape: Shape) -> Iterator[Box]:
    """The boxes that the elements `first` ... `last - 1` of a tensor make up, in their order, as few as possible."""
    if first >= last:
        return
    if len(shape) <= 1:
        yield Box((first,), (last - first,)) if shape else Box((), ())
        return
    width, inner = math.prod(shape[1:]), Box.whole(shape[1:])
    (row, offset), (last_row, rest) = divmod(first, width), divmod(last, width)
    if offset and row == last_row:
        yield from _in_row(row, offset, rest, shape)
        return
    if offset:
        yield from _in_row(row, offset, width, shape)
        row += 1
    if row < last_row:
        yield Box((row, *inner.start), (last_row - row, *inner.shape))
    yield from _in_row(last_row, 0, rest, shape)


def _in_row(row: int, first: int, last: int, shape: Shape) -> Iterator[Box]:
    return (Box((row, *box.start), (1, *box.shape)) for box in stretch(first, last, shape[1:]))
