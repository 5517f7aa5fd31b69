"""Weights in another dtype than they are kept in: cast at each use, or once while it is known that none changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class WeightCasts:
    """The casts of an engine's weights.

    While training, a cast lives as long as the product that needs it. A pass over many microbatches in which no
    weight changes keeps them, the first microbatch making each.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, each weight is cast once at most; the outermost of several ends it, and gives the memory back."""
        before = self._kept
        self._kept = {} if before is None else before
        try:
            yield
        finally:
            self._kept = None if before is None else self._kept

    def renew(self) -> None:
        """The weights have changed: what is kept is of no use any more."""
        if self._kept is not None:
            self._kept = {}

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
