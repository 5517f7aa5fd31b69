"""transformers' caches for its own layers, which read sequences chunk by chunk: one for each layer and row.

A model makes masks and positions from its cache's length alone, so where it is run without its layers it is given a
cache that holds nothing but a length.

Shapes: T tokens of a batch, L tokens of one item.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.model.adapters.transformers.skeleton import LayerArguments, Skeleton
from penstock.model.kv_cache import CachedRows
from penstock.schedule import NO_ROW, BatchItem


class RowCaches:
    """The caches of the layer of that number by row."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rows: dict[int, Any] = {}

    def of(self, item: BatchItem) -> Any:
        """The cache that the item adds to; a new one where it begins a sequence."""
        if item.start == 0:
            self._rows[item.row] = _new_cache()
        return self._rows[item.row]

    def copy(self, rows: CachedRows) -> None:
        """Give rows the beginning of their prompt from the row that has read it."""
        for item in rows.items:
            if item.source != NO_ROW and item.start:
                read, copied = self._rows[item.source].layers[self._number], _new_cache()
                copied.update(read.keys[..., : item.start, :], read.values[..., : item.start, :], self._number)
                self._rows[item.row] = copied


@dataclass(eq=False)
class Past:
    """An item's positions, and a cache that is as long as what its sequence has read and holds nothing."""

    skeleton: Skeleton
    positions_1L: Tensor
    stub: Any
    _arguments: dict[torch.dtype, Mapping[int, LayerArguments]] = field(default_factory=dict)

    def arguments(self, rows: CachedRows, dtype: torch.dtype) -> Mapping[int, LayerArguments]:
        """Each layer's arguments for this item, computed once for all layers."""
        if dtype not in self._arguments:
            self._arguments[dtype] = self.skeleton.layer_arguments(self.positions_1L, dtype, self.stub)
        return self._arguments[dtype]


class Pasts:
    """The pasts of a batch's items, made once for all units of a process."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton

    def check(self) -> None:
        """Refuse a model whose cache is not of keys and values alone.

        Raises:
            ValueError: naming the model.
        """
        model: Any = self._skeleton.model
        takes = "past_key_values" in inspect.signature(model.forward).parameters
        if not takes or getattr(model, "_is_stateful", False):
            raise ValueError(
                f"{type(model).__name__} can not generate here: it keeps more than keys and values of what it has read"
            )

    def each(self, x: Tensor, rows: CachedRows) -> Iterator[tuple[Tensor, Past]]:
        """Each item's rows of `x` [T, ...] with its past."""
        pasts = rows.shared(self, lambda: [self._past(item, x.device) for item in rows.items])
        return zip(x.split([item.length for item in rows.items]), pasts, strict=True)

    def _past(self, item: BatchItem, device: torch.device) -> Past:
        stub = _new_cache()
        if item.start:
            nothing = torch.zeros((), device=device).expand(1, 1, item.start, 1)
            stub.update(nothing, nothing, 0)
        return Past(self._skeleton, torch.arange(item.start, item.end, device=device)[None], stub)


def _new_cache() -> Any:
    """A cache that forgets nothing: windows are in the masks, and any beginning of it can be copied."""
    from transformers import DynamicCache

    return DynamicCache()
