"""The units of a causal model of transformers: what it does before its layers, each layer, and what it does after.

Sequences of unequal length are laid side by side and lengthened with their own last token. Since nothing looks ahead,
what is added changes nothing before it, whatever the family's masks.

Shapes: T tokens of the microbatch, B sequences, L tokens of the longest, D hidden size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.adapters.transformers.cache import Pasts, RowCaches
from penstock.model.adapters.transformers.skeleton import Handed, Skeleton
from penstock.model.cached import CachedRows, CacheSize
from penstock.model.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Side:
    """Sequences side by side.

    rows_BL: which token of the microbatch stands where. tokens: which places hold tokens, in order of the microbatch
    where these sequences are all of it; None where every place does. positions_BL: of each place in its sequence.
    """

    rows_BL: Tensor
    tokens: Tensor | None
    positions_BL: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], starts: tuple[int, ...], positions_T: Tensor) -> "Side":
        """Sequences of these lengths, which begin at these tokens of the microbatch."""
        device, longest = positions_T.device, max(lengths)
        places_L, ends_B1 = torch.arange(longest), torch.tensor(lengths)[:, None] - 1
        within_BL = torch.minimum(places_L[None], ends_B1)
        rows_BL = (torch.tensor(starts)[:, None] + within_BL).to(device)
        beyond_BL = (places_L[None] - within_BL).to(device)
        full = min(lengths) == longest
        tokens = None if full else (beyond_BL == 0).flatten().nonzero().squeeze(1)
        # What is added counts on, so that a family which looks for several texts in a row finds one.
        return cls(rows_BL, tokens, positions_T[rows_BL] + beyond_BL)

    def lay_out(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...]."""
        return x.index_select(0, self.rows_BL.flatten()).unflatten(0, self.rows_BL.shape)

    def take_up(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> one row for each of these sequences' tokens."""
        flat = x.flatten(0, 1)
        return flat if self.tokens is None else flat.index_select(0, self.tokens)


@dataclass(frozen=True, eq=False)
class Sides:
    """A microbatch's sequences in groups that are each run side by side; `order` puts their tokens back in order."""

    sides: tuple[Side, ...]
    order: Tensor | None

    @classmethod
    def of(cls, sequences: Sequences, by_length: bool) -> "Sides":
        """All sequences in one group, or with `by_length` those of equal length."""
        starts = tuple(sequences.cu_seqlens.tolist()[:-1])
        numbers = range(len(sequences.lengths))
        lengths = sorted(set(sequences.lengths)) if by_length else [None]
        groups = [[n for n in numbers if length in (None, sequences.lengths[n])] for length in lengths]
        sides = tuple(
            Side.of(tuple(sequences.lengths[n] for n in group), tuple(starts[n] for n in group), sequences.positions)
            for group in groups
        )
        if len(sides) == 1:
            return cls(sides, None)
        return cls(sides, torch.cat([side.take_up(side.rows_BL) for side in sides]).argsort())

    def join(self, parts: list[Tensor]) -> Tensor:
        """The groups' rows as rows of the microbatch."""
        return parts[0] if self.order is None else torch.cat(parts).index_select(0, self.order)


class Guide:
    """What a model hands its layers, worked out once a microbatch for all layers of a process; holds no parameters.

    by_length: whether what is handed changes with the longest sequence, so that unequal ones must not stand together.
    """

    def __init__(self, skeleton: Skeleton, by_length: bool) -> None:
        self.skeleton, self.by_length = skeleton, by_length
        self.pasts = Pasts(skeleton)

    def sides(self, sequences: Sequences) -> Sides:
        return sequences.shared((self, "sides"), lambda: Sides.of(sequences, self.by_length))

    def handed(self, sequences: Sequences, dtype: torch.dtype) -> list[Mapping[int, Handed]]:
        """For each group of sequences what each layer is handed, by its number."""
        sides = self.sides(sequences).sides
        return sequences.shared(
            (self, dtype), lambda: [self.skeleton.beside_hidden(side.positions_BL, dtype) for side in sides]
        )


class _Foreign(nn.Module):
    """A unit whose tables keep their precision, whatever its parameters are cast to."""

    has_randomness = False
    guide: Guide

    def __init__(self, guide: Guide) -> None:
        super().__init__()
        # Not a submodule: what it holds belongs to all units.
        self.__dict__["guide"] = guide

    def new_cache(self, size: CacheSize) -> RowCaches | None:
        """What the unit must remember of the tokens it has read; nothing, but for layers."""
        self.guide.pasts.check()
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> "_Foreign":
        before = {
            (part, name): part._buffers[name] for part in self.modules() for name in part._non_persistent_buffers_set
        }
        super()._apply(fn, recurse)
        for (part, name), buffer in before.items():
            now = part._buffers[name]
            if now is not None and buffer is not None:
                part._buffers[name] = buffer.to(now.device)
        return self


class BeforeLayers(_Foreign):
    """Token ids [T] -> hidden states [T, D], as the first layer is given them."""

    def __init__(self, skeleton: Skeleton, guide: Guide) -> None:
        super().__init__(guide)
        self.skeleton = skeleton

    def forward(self, tokens_T: Tensor, sequences: Sequences) -> Tensor:
        sides = self.guide.sides(sequences)
        parts = [
            side.take_up(self.skeleton.before_layers(side.lay_out(tokens_T), side.positions_BL)) for side in sides.sides
        ]
        return sides.join(parts)

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """Token ids [T] of the visit's pieces -> hidden states [T, D]."""
        parts = [
            self.skeleton.before_layers(tokens[None], past.positions_1L, past.stub).squeeze(0)
            for tokens, past in self.guide.pasts.each(x, rows)
        ]
        return torch.cat(parts)


class ForeignLayer(_Foreign):
    """One layer, [T, D] -> [T, D]."""

    def __init__(self, layer: nn.Module, number: int, guide: Guide) -> None:
        super().__init__(guide)
        self.layer, self.number = layer, number

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        sides = self.guide.sides(sequences)
        parts = []
        for side, of_layers in zip(sides.sides, self.guide.handed(sequences, x_TD.dtype), strict=True):
            handed = of_layers[self.number]
            output = self.layer(side.lay_out(x_TD), *handed.args, **handed.kwargs)
            parts.append(side.take_up(output[0] if isinstance(output, tuple) else output))
        return sides.join(parts)

    def new_cache(self, size: CacheSize) -> RowCaches:
        """A cache of transformers for each row, made when the row is first read."""
        self.guide.pasts.check()
        return RowCaches(self.number)

    def decode(self, x: Tensor, cache: RowCaches, rows: CachedRows) -> Tensor:
        """[T, D] -> [T, D], piece by piece; each piece adds to its row's cache."""
        parts = []
        for (x_LD, past), piece in zip(self.guide.pasts.each(x, rows), rows.pieces, strict=True):
            handed = past.handed(rows, x.dtype)[self.number].instead(past.stub, cache.of(piece))
            output = self.layer(x_LD[None], *handed.args, **handed.kwargs)
            parts.append((output[0] if isinstance(output, tuple) else output).squeeze(0))
        return torch.cat(parts)


class AfterLayers(_Foreign):
    """Hidden states [T, D] of the last layer -> logits [T, V]."""

    def __init__(self, skeleton: Skeleton, guide: Guide) -> None:
        super().__init__(guide)
        self.skeleton = skeleton

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.skeleton.after_layers(x_TD)

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """Hidden states [T, D] -> logits [S, V] of the sampled tokens."""
        num_sampled = len(rows.sampled_S)
        # Where none is sampled, one token tells how wide logits are.
        sampled_SD = x.index_select(0, rows.sampled_S) if num_sampled else x[:1]
        return self.skeleton.after_layers(sampled_SD)[:num_sampled]
