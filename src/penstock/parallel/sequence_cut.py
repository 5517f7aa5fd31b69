"""How ranks share the tokens of every sequence: arithmetic alone.

A sequence is cut into parts as equal as whole tokens allow. In zig-zag order rank r of n holds parts r and 2n - 1 - r:
a token's causal attention costs what lies before it, and an early part with a late one costs every rank the same.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

Pieces = tuple[tuple[range, ...], ...]


class ContextCut(enum.Enum):
    """Which parts of a sequence a rank holds: one part, or two that together cost as much as any other rank's."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


def cut_sequences(lengths: Sequence[int], num_ranks: int, cut: ContextCut = ContextCut.ZIGZAG) -> tuple[Pieces, ...]:
    """The positions that each rank holds of each sequence: by rank, by sequence, runs in ascending order.

    Raises: ValueError when a rank would hold nothing at all.
    """
    pieces = tuple(tuple(_held(n, rank, num_ranks, cut) for n in lengths) for rank in range(num_ranks))
    for of_rank in pieces:
        if not any(of_rank):
            possible = max(n for n in range(1, num_ranks) if all(any(p) for p in _all_held(lengths, n, cut)))
            raise ValueError(
                f"cp={num_ranks} ranks can not share sequences of {list(lengths)} tokens: some rank would hold none; "
                f"at most cp={possible} can, or give microbatches of more tokens"
            )
    return pieces


def _all_held(lengths: Sequence[int], num_ranks: int, cut: ContextCut) -> list[Pieces]:
    return [tuple(_held(n, rank, num_ranks, cut) for n in lengths) for rank in range(num_ranks)]


def _held(length: int, rank: int, num_ranks: int, cut: ContextCut) -> tuple[range, ...]:
    if cut is ContextCut.CONTIGUOUS:
        parts = (_part(length, rank, num_ranks),)
    else:
        parts = tuple(_part(length, part, 2 * num_ranks) for part in (rank, 2 * num_ranks - 1 - rank))
        if parts[0].stop == parts[1].start:
            parts = (range(parts[0].start, parts[1].stop),)
    return tuple(part for part in parts if part)


def _part(length: int, index: int, count: int) -> range:
    return range(index * length // count, (index + 1) * length // count)
