"""Tiles cover exactly what is seen, and both ways to compute one agree; parts merge into the whole."""

import itertools

import pytest
import torch
from torch import Tensor

from penstock.model.attention.tiles import (
    Positions,
    Relation,
    Tile,
    attend,
    attend_backward,
    attend_backward_written_out,
    attend_written_out,
    merge_part,
    tiles,
)
from penstock.model.sequences import cut_sequences

WINDOWS = [None, 1, 2, 5, 9, 50]


def seen(queries: Positions, keys: Positions, window: int | None) -> Tensor:
    """[L, S], written from the definition of what a token sees."""
    rows = [[_sees(q, k, window) for r in keys for k in r] for p in queries for q in p]
    return torch.tensor(rows)


def _sees(query: int, key: int, window: int | None) -> bool:
    return key <= query and (window is None or query - key < window)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_tiles_cover_what_is_seen_once_and_nothing_else(window: int | None, apart: bool) -> None:
    num_tiles = 0
    for length, ranks in itertools.product((1, 2, 7, 16), (1, 2, 3)):
        if length < ranks:
            continue
        pieces = cut_sequences([length], ranks)
        for (queries,), (keys,) in itertools.product(pieces, pieces):
            if not (queries and keys):
                continue
            count = torch.zeros(sum(map(len, queries)), sum(map(len, keys)), dtype=torch.int64)
            for tile in tiles(queries, keys, window, apart):
                part = count[tile.queries, tile.keys]
                if tile.relation is Relation.CAUSAL:
                    part += torch.ones_like(part).tril()
                else:
                    part += tile.mask(torch.device("cpu"))
                assert tile.relation is not Relation.FULL or bool(tile.mask(torch.device("cpu")).all())
                num_tiles += 1
            assert torch.equal(count, seen(queries, keys, window).long())
    assert num_tiles > 20


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_zigzag_costs_every_rank_the_same_and_few_tiles(ranks: int) -> None:
    pieces = cut_sequences([8 * ranks * ranks], ranks)
    works = []
    for (queries,) in pieces:
        found = [tiles(queries, keys, None) for (keys,) in pieces]
        assert all(len(of_keys) == 1 for of_keys in found)
        works.append(sum(int(seen(queries, keys, None).sum()) for (keys,) in pieces))
    assert len(set(works)) == 1


def test_every_length_is_shared_as_evenly_as_tokens_allow() -> None:
    for length, ranks in itertools.product(range(1, 40), (1, 2, 3, 4)):
        pieces = cut_sequences([length], ranks)
        assert len(pieces) == ranks
        held = sorted(p for (of_rank,) in pieces for piece in of_rank for p in piece)
        assert held == list(range(length))
        counts = [sum(map(len, of_rank)) for (of_rank,) in pieces]
        assert max(counts) - min(counts) <= 2


def example(tile: Tile, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    num_queries, num_keys = tile.mask(torch.device("cpu")).shape
    q, grad = torch.randn(2, 2, 4, num_queries, 8, dtype=dtype)
    k, v = torch.randn(2, 2, 2, num_keys, 8, dtype=dtype)
    return q, k, v, grad


TILES = [
    Tile(slice(0, 5), slice(0, 5), Relation.CAUSAL, (range(5),), (range(5),)),
    Tile(slice(0, 4), slice(0, 6), Relation.FULL, (range(6, 10),), (range(6),)),
    Tile(slice(0, 4), slice(0, 6), Relation.MASKED, (range(6, 10),), (range(6),), 3),
]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.relation.name)
def test_the_kernel_and_the_formula_agree(tile: Tile) -> None:
    q, k, v, grad = example(tile, torch.float64)
    out, lse = attend(q, k, v, tile)
    plain_out, plain_lse = attend_written_out(q, k, v, tile)
    torch.testing.assert_close(out, plain_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-12, atol=1e-12)
    finite = lse.masked_fill(lse == -torch.inf, 0)  # in a ring every token sees itself
    ours = attend_backward(grad, (q, k, v), out, finite, tile)
    for mine, theirs in zip(ours, attend_backward_written_out(grad, (q, k, v), out, finite, tile), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_parts_merge_into_the_softmax_over_all_keys() -> None:
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    out, lse = torch.zeros(1, 2, 3, 4, dtype=torch.float64), torch.full((1, 2, 3), -torch.inf, dtype=torch.float64)
    for start, stop in ((0, 2), (2, 3), (3, 9)):
        tile = Tile(slice(0, 3), slice(start, stop), Relation.FULL, (range(9, 12),), (range(start, stop),))
        part = attend(q.double(), k[:, :, start:stop].double(), v[:, :, start:stop].double(), tile)
        merge_part(out, lse, *part)
        nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        merge_part(out, lse, *nothing)
    scores = (q @ k.transpose(-1, -2)).double() * 4**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.double(), rtol=1e-6, atol=1e-6)
