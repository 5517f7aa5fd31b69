"""What some tokens see of some others, cut into tiles: rows of queries against rows of keys.

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
    """Which tokens of its own sequence a token sees: with `causal` none after it, and of those before (and after)
    it only such as are less than `window` away; None for all."""

    causal: bool = True
    window: int | None = None


class Relation(Enum):
    """What the queries of a tile see of its keys: everything, what does not come later, or what a mask tells."""

    FULL = auto()
    CAUSAL = auto()
    MASKED = auto()


Positions = tuple[range, ...]


@dataclass(frozen=True)
class Tile:
    """Some rows of queries against some rows of keys, the same ones in each sequence of a run.

    Rows count from the sequence's first token here; the positions say where in the whole sequence these tokens stand.
    """

    queries: slice
    keys: slice
    relation: Relation
    query_positions: Positions
    key_positions: Positions
    sight: Sight

    def mask(self, device: torch.device) -> Tensor:
        """[L, S], true where the row's token sees the column's."""
        return _mask(self.query_positions, self.key_positions, self.sight).to(device)


@lru_cache(maxsize=256)
def _mask(queries: Positions, keys: Positions, sight: Sight) -> Tensor:
    q_L, k_S = (torch.cat([torch.arange(p.start, p.stop) for p in positions]) for positions in (queries, keys))
    distance_LS = q_L[:, None] - k_S[None]
    seen_LS = distance_LS >= 0 if sight.causal else torch.ones_like(distance_LS, dtype=torch.bool)
    return seen_LS if sight.window is None else seen_LS & (distance_LS.abs() < sight.window)


@lru_cache(maxsize=4096)
def tiles(queries: Positions, keys: Positions, sight: Sight, apart: bool = False) -> tuple[Tile, ...]:
    """The tiles in which queries at these positions see keys at those, both ascending: as few as possible.

    With `apart` they are cut along the pieces, and those that are seen in part come first.
    """
    if not (queries and keys):
        return ()
    if not apart and queries == keys and sight.causal and not _narrows(sight, _span(queries), _span(keys)):
        # Of tokens in ascending order an earlier row is an earlier position, whatever lies between them.
        return (Tile(_rows(queries), _rows(keys), Relation.CAUSAL, queries, keys, sight),)
    found = [
        Tile(_rows(queries, i), _rows(keys, j), relation, (query,), (key,), sight)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if (relation := _relation(query, key, sight)) is not None
    ]
    if apart:
        return tuple(sorted(found, key=lambda tile: tile.relation is Relation.FULL))
    # First what lies side by side, then what of that lies one below the other.
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
    """Whether the window hides some key that causality leaves."""
    if sight.window is None:
        return False
    after = 0 if sight.causal else keys.stop - 1 - queries.start
    return max(queries.stop - 1 - keys.start, after) >= sight.window


def _joined(first: Tile, second: Tile) -> Tile | None:
    """One tile for two full ones that lie side by side or one below the other."""
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
