"""Division of every sequence's tokens among context-parallel ranks: arithmetic alone.

A sequence is cut into parts as equal as whole tokens allow. In zig-zag order rank r of n has parts r and 2n - 1 - r: a
token's causal attention costs what lies before it, and an early part with a late one costs every rank the same.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

Pieces = tuple[tuple[range, ...], ...]
"""The positions that one rank has: by sequence, in runs of ascending order."""


class ContextCut(enum.Enum):
    """The parts of a sequence that a rank has: one, or two that together cost as much as any other rank's."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


def cut_sequences(lengths: Sequence[int], num_ranks: int, cut: ContextCut = ContextCut.ZIGZAG) -> tuple[Pieces, ...]:
    """Give each rank its positions in sequences of these lengths.

    Raises: ValueError when a rank would have no token at all.
    """
    by_rank = _cut(lengths, num_ranks, cut)
    if all(any(runs) for runs in by_rank):
        return by_rank
    possible = max(n for n in range(1, num_ranks) if all(any(runs) for runs in _cut(lengths, n, cut)))
    raise ValueError(
        f"cp={num_ranks} ranks can not share sequences of {list(lengths)} tokens: some rank would hold none; "
        f"at most cp={possible} can, or give microbatches of more tokens"
    )


def _cut(lengths: Sequence[int], num_ranks: int, cut: ContextCut) -> tuple[Pieces, ...]:
    return tuple(tuple(_runs(length, rank, num_ranks, cut) for length in lengths) for rank in range(num_ranks))


def _runs(length: int, rank: int, num_ranks: int, cut: ContextCut) -> tuple[range, ...]:
    if cut is ContextCut.CONTIGUOUS:
        parts = (_part(length, rank, num_ranks),)
    else:
        parts = tuple(_part(length, part, 2 * num_ranks) for part in (rank, 2 * num_ranks - 1 - rank))
        if parts[0].stop == parts[1].start:
            parts = (range(parts[0].start, parts[1].stop),)
    return tuple(part for part in parts if part)


def _part(length: int, index: int, count: int) -> range:
    return range(index * length // count, (index + 1) * length // count)
