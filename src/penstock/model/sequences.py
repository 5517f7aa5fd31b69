"""The metadata of packed sequences, which every unit receives beside the residual stream.

With it go the losses that units in the middle of a model add to the loss, and their counts of tokens per expert.

Context-parallel ranks divide the tokens of every sequence. A sequence is cut into parts of equal length, as nearly as
whole tokens allow. In zig-zag order rank r of n has parts r and 2n - 1 - r: causal attention costs a token as much as
there is before it, so an early part and a late one together cost every rank the same.

Shapes: T tokens of all sequences, B sequences.
"""

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.model.linear import with_gradient
from penstock.parallel.staging import in_one_copy

IGNORED = -100
"""The label of a token that has no loss."""


class AuxLoss(enum.Enum):
    """The kinds of auxiliary losses."""

    BALANCE = "balance"
    SEQUENCE_BALANCE = "sequence_balance"
    GLOBAL_BALANCE = "global_balance"
    Z = "z"
    PREDICTION = "prediction"


def only_read(x_TD: Tensor, rows: Tensor | None) -> Tensor:
    """The rows [R, D] of a stream that somebody reads; without `rows` the stream itself."""
    return x_TD if rows is None else x_TD.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class FutureTokens:
    """For each token of a microbatch, the token and label a fixed distance further on in its sequence.

    Past the end of the sequence the label is -100 and the token is the token itself.
    """

    #: int64
    tokens_T: Tensor
    #: those of `rows` alone, if there are some
    labels_T: Tensor
    #: the tokens [R] int64 from which these labels are predicted; None for all
    read_rows: Tensor | None = None

    @classmethod
    def of(cls, tokens_T: Tensor, labels_T: Tensor, lengths: Sequence[int], distance: int) -> "FutureTokens":
        """The tokens and labels `distance` places further on, in packed sequences of these lengths."""
        left_T = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths]).to(tokens_T.device)
        inside_T = left_T >= distance
        tokens = tokens_T.roll(-distance).where(inside_T, tokens_T)
        return cls(tokens, labels_T.roll(-distance).masked_fill(~inside_T, IGNORED))

    def rows(self, rows: Tensor) -> "FutureTokens":
        """Tokens and labels of these rows alone."""
        return FutureTokens(self.tokens_T.index_select(0, rows), self.labels_T.index_select(0, rows))

    def reading(self, rows: Tensor | None) -> "FutureTokens":
        """All tokens, with the labels of the rows from which they are predicted; None for all rows."""
        return self if rows is None else FutureTokens(self.tokens_T, self.labels_T.index_select(0, rows), rows)


@dataclass(eq=False)
class AuxLosses:
    """The factors of one microbatch's loss, and the auxiliary losses and counts of the units on this rank.

    Activation checkpointing computes a unit again in backward; it then replaces its entries by the same values.
    """

    #: factor of the microbatch's main loss, which is a sum over labels; includes the loss scale
    factor: float
    #: factor of a sum over tokens: `factor` times the labels' weight per token of the step, so that a coefficient means
    #: the same whatever share of the tokens has a label
    per_token: float
    #: (unit, kind) -> the loss, detached
    values: dict[tuple[nn.Module, AuxLoss], Tensor] = field(default_factory=dict)
    #: router's state -> tokens of each expert
    counts: dict[nn.Module, Tensor] = field(default_factory=dict)

    def add(self, carrier: Tensor, loss: Tensor, owner: nn.Module, kind: AuxLoss, num_sharing: int = 1) -> Tensor:
        """Attach a loss, which includes its factor, to the carrier and return it.

        If `num_sharing` ranks compute the same loss, each records its share, because records are summed over ranks.
        """
        self.values[owner, kind] = loss.detach() / num_sharing

        def forward(carrier: Tensor, loss: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            return carrier.view_as(carrier), (loss,)

        def backward(grad: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
            return grad, torch.ones_like(loss)

        return with_gradient(forward, backward, carrier, loss)


Value = TypeVar("Value")

Pieces = tuple[tuple[range, ...], ...]
"""The positions that one rank has: by sequence, in runs of ascending order."""


def cut_sequences(lengths: Sequence[int], num_ranks: int) -> tuple[Pieces, ...]:
    """Give each rank its positions in sequences of these lengths; of few tokens some ranks get none."""
    return tuple(tuple(_runs(length, rank, num_ranks) for length in lengths) for rank in range(num_ranks))


def _runs(length: int, rank: int, num_ranks: int) -> tuple[range, ...]:
    early, late = (_run(length, part, 2 * num_ranks) for part in (rank, 2 * num_ranks - 1 - rank))
    parts = (range(early.start, late.stop),) if early.stop == late.start else (early, late)
    return tuple(part for part in parts if part)


def _run(length: int, index: int, count: int) -> range:
    return range(index * length // count, (index + 1) * length // count)


@dataclass(frozen=True)
class Spread:
    """The positions of every sequence on each rank of a context-parallel group."""

    #: this rank
    rank: int
    #: rank -> sequence -> its runs of positions there, ascending
    pieces: tuple[Pieces, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.pieces)

    @cached_property
    def num_tokens(self) -> tuple[int, ...]:
        """The number of tokens on each rank."""
        return tuple(sum(len(run) for runs in sequences for run in runs) for sequences in self.pieces)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each whole sequence."""
        return tuple(sum(len(run) for runs in of_ranks for run in runs) for of_ranks in zip(*self.pieces, strict=True))

    def rows(self, rank: int) -> Tensor:
        """The positions of a rank's tokens among those of all packed sequences, in the rank's order."""
        starts = accumulate(self.lengths[:-1], initial=0)
        runs = [
            torch.arange(start + run.start, start + run.stop)
            for start, of_sequence in zip(starts, self.pieces[rank], strict=True)
            for run in of_sequence
        ]
        return torch.cat([torch.arange(0), *runs])


@dataclass(frozen=True, eq=False)
class SharedByLayers:
    """Values that all layers derive from the same metadata (rotary tables, masks)."""

    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def shared(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of this key, made once and kept with this object."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def forget_shared(self) -> None:
        """Drop the cached values; they are computed again on next use."""
        self._shared.clear()


@dataclass(frozen=True, eq=False)
class Sequences(SharedByLayers):
    """The boundaries of packed sequences, and the position of each token in its sequence."""

    #: tokens of each sequence
    lengths: tuple[int, ...]
    #: [B+1] int32, each sequence's first token, and the end of the last sequence
    cu_seqlens: Tensor
    #: [T] int64, for the rotary positions
    positions: Tensor
    #: the longest of `lengths`, and their sum, known without asking the device
    max_length: int
    num_tokens: int
    #: under context parallelism, the positions on each rank; everything else describes this rank's part, where a
    #: sequence may have the length 0
    spread: Spread | None = None
    #: the record of auxiliary losses; None outside of training
    aux_losses: AuxLosses | None = None
    #: True if the positions were given, and need not count up in each sequence
    has_own_positions: bool = False
    #: the tokens [R] int64 whose outputs somebody reads; None for all
    read_rows: Tensor | None = None
    #: tokens one, two, ... places further on, for a head that predicts them; known on the last stage in training
    ahead: tuple[FutureTokens, ...] = ()

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", positions: Tensor | None = None
    ) -> "Sequences":
        """Sequences of these lengths; without `positions` [T] each sequence starts at position 0.

        Raises:
            ValueError: no sequence, a length below 1, or positions of another length.
        """
        lengths = tuple(map(int, lengths))
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths={lengths}: at least one sequence is needed, each of at least one token")
        num_tokens = sum(lengths)
        if positions is None:
            positions = torch.cat(list(map(torch.arange, lengths)))
        elif tuple(positions.shape) != (num_tokens,):
            raise ValueError(f"positions have shape {tuple(positions.shape)}, but the lengths add up to {num_tokens}")
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, starts, positions.to(torch.int64), max(lengths), num_tokens).to(torch.device(device))

    @classmethod
    def of_spread(cls, spread: Spread, device: torch.device | str = "cpu") -> "Sequences":
        """This rank's part of sequences that are spread over several ranks; each sequence starts at position 0."""
        parts = spread.pieces[spread.rank]
        lengths = tuple(sum(map(len, runs)) for runs in parts)
        # A rank may have no token at all.
        positions = torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop) for runs in parts for run in runs)])
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(lengths, starts, positions, max(lengths), len(positions), spread).to(torch.device(device))

    def tables(self) -> list[dict[str, Tensor]]:
        """The tensors, by field: these sequences' own, and those of each of the tokens ahead."""
        records = (self, *self.ahead)
        return [{f.name: x for f in fields(own) if isinstance(x := getattr(own, f.name), Tensor)} for own in records]

    def with_tables(self, tables: Sequence[Mapping[str, Tensor]]) -> "Sequences":
        """These sequences with copies of what `tables` gives."""
        own, *ahead = tables
        return replace(self, **own, ahead=tuple(FutureTokens(**tensors) for tensors in ahead))

    def to(self, device: torch.device) -> "Sequences":
        """These sequences with their tensors on a device; see `in_one_copy`."""
        return self.with_tables(in_one_copy(self.tables(), device))

    def with_aux_losses(self, aux_losses: AuxLosses) -> "Sequences":
        """These sequences with a record for auxiliary losses."""
        return replace(self, aux_losses=aux_losses)

    def with_positions(self, positions: Tensor) -> "Sequences":
        """These sequences, whose tokens have these positions [T]."""
        return replace(self, positions=positions.to(self.positions), has_own_positions=True)

    def with_read_rows(self, rows: Tensor | None) -> "Sequences":
        """These sequences, of whose outputs only these rows are read."""
        return self if rows is None else replace(self, read_rows=rows.to(self.positions.device))

    def whole(self, values: Tensor) -> Tensor:
        """A row for each token [T, ...] from those of the rows that are read [R, ...]; zero for the others."""
        if self.read_rows is None:
            return values
        return values.new_zeros((self.num_tokens, *values.shape[1:])).index_copy_(0, self.read_rows, values)
