"""Context parallelism refuses heads that its ranks cannot share."""

import pytest

from penstock.model.attention.context_parallel import HeadShape, check_heads
from penstock.settings import ContextForm


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(8, 2, 4), (6, 4, 4), (3, 3, 2)])
def test_heads_that_ranks_cannot_share_are_refused_with_what_is_possible(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    shape = HeadShape(num_heads, num_kv_heads, None)
    with pytest.raises(ValueError, match=rf"cp={num_ranks}; possible are cp = 1\b.*'ring'"):
        check_heads(ContextForm.ALL_TO_ALL, num_ranks, shape)
    check_heads(ContextForm.RING, num_ranks, shape)
    check_heads(ContextForm.ALL_TO_ALL, 1, shape)
