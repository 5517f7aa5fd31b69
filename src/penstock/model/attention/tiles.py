"""The mask of attention between two sets of tokens, cut into tiles: rows of queries against rows of keys.

Shapes: L queries, S keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """The tokens of its own sequence that a token sees: none after it if `causal`, and none `window` or more away."""

    causal: bool = True
    window: int | None = None


class Relation(Enum):
    """The keys of a tile that its queries see: all, those that do not come later, or those that a mask shows."""

    FULL = auto()
    CAUSAL = auto()
    MASKED = auto()


Positions = tuple[range, ...]


@dataclass(frozen=True)
class Tile:
    """Some rows of queries against some rows of keys, the same ones in each sequence of a run.

    Rows count from the sequence's first token on this rank; positions are those in the whole sequence.
    """

    queries: slice
    keys: slice
    relation: Relation
    query_positions: Positions
    key_positions: Positions
    sight: Sight

    def mask(self, device: torch.device) -> Tensor:
        """[L, S], true where the row's token sees the column's token."""
        return _mask(self.query_positions, self.key_positions, self.sight).to(device)


@lru_cache(maxsize=256)
def _mask(queries: Positions, keys: Positions, sight: Sight) -> Tensor:
    q_L, k_S = (torch.cat([torch.arange(p.start, p.stop) for p in positions]) for positions in (queries, keys))
    distance_LS = q_L[:, None] - k_S[None]
    seen_LS = distance_LS >= 0 if sight.causal else torch.ones_like(distance_LS, dtype=torch.bool)
    return seen_LS if sight.window is None else seen_LS & (distance_LS.abs() < sight.window)


@lru_cache(maxsize=4096)
def tiles(queries: Positions, keys: Positions, sight: Sight, apart: bool = False) -> tuple[Tile, ...]:
    """The tiles, as few as possible, in which queries at these positions see keys at those; both are ascending.

    With `apart` tiles are cut along the runs of positions, and those that are seen in part come first.
    """
    if not (queries and keys):
        return ()
    if not apart and queries == keys and sight.causal and not _narrows(sight, _span(queries), _span(keys)):
        # Tokens are ascending, so an earlier row is an earlier position, whatever lies between them.
        return (Tile(_rows(queries), _rows(keys), Relation.CAUSAL, queries, keys, sight),)
    found = [
        Tile(_rows(queries, i), _rows(keys, j), relation, (query,), (key,), sight)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if (relation := _relation(query, key, sight)) is not None
    ]
    if apart:
        return tuple(sorted(found, key=lambda tile: tile.relation is Relation.FULL))
    # First tiles side by side are merged, then the results one below the other.
    return tuple(_merged(_merged(found)))


def _merged(found: Sequence[Tile]) -> list[Tile]:
    merged: list[Tile] = []
    for tile in found:
        joined = _joined(merged[-1], tile) if merged else None
        merged[-1:] = [joined] if joined else [*merged[-1:], tile]
    return merged


def _relation(queries: range, keys: range, sight: Sight) -> Relation | None:
    if not queries or not keys:
        return None
    nearest, farthest = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
    if sight.causal and farthest < 0:
        return None
    if sight.window is not None and (nearest >= sight.window or (not sight.causal and -farthest >= sight.window)):
        return None
    if _narrows(sight, queries, keys):
        return Relation.MASKED
    if not sight.causal or nearest >= 0:
        return Relation.FULL
    return Relation.CAUSAL if queries == keys else Relation.MASKED


def _narrows(sight: Sight, queries: range, keys: range) -> bool:
    """True if the window hides some key that causality does not."""
    if sight.window is None:
        return False
    after = 0 if sight.causal else keys.stop - 1 - queries.start
    return max(queries.stop - 1 - keys.start, after) >= sight.window


def _joined(first: Tile, second: Tile) -> Tile | None:
    """One tile for two full tiles that lie side by side or one below the other."""
    if not first.relation is second.relation is Relation.FULL:
        return None
    if first.queries == second.queries and first.keys.stop == second.keys.start:
        keys = slice(first.keys.start, second.keys.stop)
        positions = first.key_positions + second.key_positions
        return Tile(first.queries, keys, Relation.FULL, first.query_positions, positions, first.sight)
    if first.keys == second.keys and first.queries.stop == second.queries.start:
        queries = slice(first.queries.start, second.queries.stop)
        positions = first.query_positions + second.query_positions
        return Tile(queries, first.keys, Relation.FULL, positions, first.key_positions, first.sight)
    return None


def _span(positions: Positions) -> range:
    return range(positions[0].start, positions[-1].stop)


def _rows(positions: Positions, index: int | None = None) -> slice:
    if index is None:
        return slice(0, sum(map(len, positions)))
    start = sum(map(len, positions[:index]))
    return slice(start, start + len(positions[index]))
