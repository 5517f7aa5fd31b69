"""transformers' caches for its own layers, which read sequences piece by piece: one for each layer and row.

A model makes masks and positions from its cache's length alone, so where it is run without its layers it is given a
cache that holds nothing but a length.

Shapes: T tokens of a visit's pieces, L tokens of a piece.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.model.adapters.transformers.skeleton import LayerArguments, Skeleton
from penstock.model.cached import CachedRows
from penstock.schedule import NO_ROW, Piece


class RowCaches:
    """The caches of the layer of that number by row."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rows: dict[int, Any] = {}

    def of(self, piece: Piece) -> Any:
        """The cache that the piece adds to; a new one where it begins a sequence."""
        if piece.start == 0:
            self._rows[piece.row] = _new_cache()
        return self._rows[piece.row]

    def copy(self, rows: CachedRows) -> None:
        """Give rows the beginning of their prompt from the row that has read it."""
        for piece in rows.pieces:
            if piece.source != NO_ROW and piece.start:
                read, copied = self._rows[piece.source].layers[self._number], _new_cache()
                copied.update(read.keys[..., : piece.start, :], read.values[..., : piece.start, :], self._number)
                self._rows[piece.row] = copied


@dataclass(eq=False)
class Past:
    """A piece's positions, and a cache that is as long as what its sequence has read and holds nothing."""

    skeleton: Skeleton
    positions_1L: Tensor
    stub: Any
    _arguments: dict[torch.dtype, Mapping[int, LayerArguments]] = field(default_factory=dict)

    def arguments(self, rows: CachedRows, dtype: torch.dtype) -> Mapping[int, LayerArguments]:
        """Each layer's arguments for this piece, computed once for all layers."""
        if dtype not in self._arguments:
            self._arguments[dtype] = self.skeleton.layer_arguments(self.positions_1L, dtype, self.stub)
        return self._arguments[dtype]


class Pasts:
    """The pasts of a visit's pieces, made once for all units of a process."""

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
        """Each piece's rows of `x` [T, ...] with its past."""
        pasts = rows.shared(self, lambda: [self._past(piece, x.device) for piece in rows.pieces])
        return zip(x.split([piece.length for piece in rows.pieces]), pasts, strict=True)

    def _past(self, piece: Piece, device: torch.device) -> Past:
        stub = _new_cache()
        if piece.start:
            nothing = torch.zeros((), device=device).expand(1, 1, piece.start, 1)
            stub.update(nothing, nothing, 0)
        return Past(self._skeleton, torch.arange(piece.start, piece.end, device=device)[None], stub)


def _new_cache() -> Any:
    """A cache that forgets nothing: windows are in the masks, and any beginning of it can be copied."""
    from transformers import DynamicCache

    return DynamicCache()
