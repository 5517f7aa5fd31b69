"""The metadata of packed sequences, which every unit receives beside the residual stream.

Shapes: T tokens of all sequences, B sequences.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.model.aux_losses import LossTerms

Value = TypeVar("Value")


@dataclass(frozen=True)
class Spread:
    """Which positions of every sequence each of the ranks holds that share them.

    rank: this one. pieces: by rank, by sequence, the runs of positions held, in ascending order.
    """

    rank: int
    pieces: tuple[tuple[tuple[range, ...], ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.pieces)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(sum(len(piece) for held in sequences for piece in held) for sequences in self.pieces)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each whole sequence."""
        return tuple(
            sum(len(piece) for held in of_ranks for piece in held) for of_ranks in zip(*self.pieces, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where each of the packed sequences begins and ends, and the position of every token in its own.

    Args:
        lengths: tokens of each sequence.
        cu_seqlens: [B+1] int32, where each sequence begins, and where the last one ends.
        positions: [T] int64, what the rotary positions turn by.
        max_length: the longest of `lengths`, known without asking the device.
        spread: where several ranks share each sequence's tokens, who holds which; all else is of this rank's then, and
            a sequence of which it holds nothing has the length 0.
        terms: where units note what they add to the microbatch's loss; None where nothing is learned.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    positions: Tensor
    max_length: int
    spread: Spread | None = None
    terms: LossTerms | None = None
    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", positions: Tensor | None = None
    ) -> "Sequences":
        """Sequences of these lengths; without `positions` [T] each one counts from 0.

        Raises:
            ValueError: no sequence, a length below 1, or positions of another length.
        """
        lengths = tuple(int(n) for n in lengths)
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths={lengths}: at least one sequence is needed, each of at least one token")
        num_tokens = sum(lengths)
        if positions is None:
            positions = torch.cat([torch.arange(n) for n in lengths])
        elif tuple(positions.shape) != (num_tokens,):
            raise ValueError(f"positions have shape {tuple(positions.shape)}, but the lengths add up to {num_tokens}")
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, starts.to(device), positions.to(device, torch.int64), max(lengths))

    @classmethod
    def of_spread(cls, spread: Spread, device: torch.device | str = "cpu") -> "Sequences":
        """This rank's part of sequences that are spread over several ranks; each sequence counts from 0."""
        held = spread.pieces[spread.rank]
        lengths = tuple(sum(map(len, pieces)) for pieces in held)
        positions = torch.cat([torch.arange(piece.start, piece.stop) for pieces in held for piece in pieces])
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, starts.to(device), positions.to(device, torch.int64), max(lengths), spread)

    def learning(self, terms: LossTerms) -> "Sequences":
        """The same, for a microbatch whose loss takes these terms."""
        return replace(self, terms=terms)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    def shared(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What all layers make alike of this metadata (rotary tables, masks): made once, kept with this object."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]
