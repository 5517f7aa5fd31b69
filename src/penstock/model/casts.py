"""Weights in another dtype or order than they are kept in, while it is known that none changes.

A cast is needed anyway, and is else made at each use; weights packed for the products are a copy of them, which only
generation makes, for it reads all weights again for each token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class WeightCasts:
    """The casts of an engine's weights, and weights packed for its products.

    While training, a cast lives as long as the product that needs it. A pass over many microbatches in which no
    weight changes keeps them, the first microbatch making each.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] | None = None
        self._packed: dict[tuple[Tensor, ...], Tensor | None] = {}
        self._packs = False

    @contextmanager
    def kept(self, packed: bool = False) -> Iterator[None]:
        """Inside, each weight is cast once at most; the outermost of several ends it, and gives the memory back.

        packed: whether weights are packed as well.
        """
        before, packs = self._kept, self._packs
        self._kept = {} if before is None else before
        self._packs = packed
        try:
            yield
        finally:
            self._packs = packs
            if before is None:
                self._kept = None
                self._packed.clear()

    def renew(self) -> None:
        """The weights have changed: what is kept is of no use any more."""
        if self._kept is not None:
            self._kept = {}
        self._packed.clear()

    def packed(self, weights: tuple[Tensor, ...], pack: Callable[[], Tensor | None]) -> Tensor | None:
        """What `pack` makes of the weights, made once; None where nothing is packed now, or these can not be."""
        if not self._packs:
            return None
        if weights not in self._packed:
            self._packed[weights] = pack()
        return self._packed[weights]

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in that dtype; the weight itself if it is of it."""
        if weight.dtype == dtype or self._kept is None:
            return weight.to(dtype)
        found = self._kept.get(weight)
        if found is None or found.dtype != dtype:
            found = self._kept[weight] = weight.detach().to(dtype)
        return found


@runtime_checkable
class Casting(Protocol):
    """A module that asks for its weights' casts, where it is told whom to ask."""

    casts: WeightCasts | None


def share_casts(module: nn.Module, casts: WeightCasts) -> int:
    """Tell every part of the module that casts weights where casts are kept; how many there were."""
    found = [part for part in module.modules() if isinstance(part, Casting)]
    for part in found:
        part.casts = casts
    return len(found)
