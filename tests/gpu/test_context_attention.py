"""On a GPU the flash kernels give what the formula gives, tile by tile and put together."""

import pytest
import torch

from penstock.model.attention.tiles import (
    Relation,
    Tile,
    attend,
    attend_backward,
    attend_backward_written_out,
    attend_written_out,
)

TILES = [
    Tile(slice(0, 64), slice(0, 64), Relation.CAUSAL, (range(64),), (range(64),)),
    Tile(slice(0, 48), slice(0, 80), Relation.FULL, (range(80, 128),), (range(80),)),
    Tile(slice(0, 48), slice(0, 80), Relation.MASKED, (range(80, 128),), (range(80),), 60),
]


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.relation.name)
def test_output_sum_and_gradients_are_those_of_the_formula(tile: Tile, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    num_queries, num_keys = tile.mask(torch.device("cpu")).shape
    of_queries, of_keys = (2, 4, num_queries, 64), (2, num_kv_heads, num_keys, 64)
    q, grad, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in (of_queries, of_queries, of_keys, of_keys)
    )
    wide = q.double(), k.double(), v.double()
    out, lse = attend(q, k, v, tile)
    exact_out, exact_lse = attend_written_out(*wide, tile)
    seen = exact_lse != -torch.inf
    # The softmax's weights and the output are rounded to 16 bit; gradients are sums of some sixty such products.
    torch.testing.assert_close(out.double(), exact_out, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)
    torch.testing.assert_close(lse.double()[seen], exact_lse[seen], rtol=1e-3, atol=1e-3)
    finite = exact_lse.masked_fill(~seen, 0)
    found = attend_backward(grad, (q, k, v), out, finite.float(), tile)
    exact = attend_backward_written_out(grad.double(), wide, exact_out, finite, tile)
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine.double() - theirs).abs().max() <= 0.02 * theirs.abs().max()
