"""Context parallelism refuses heads that its ranks cannot share."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.model.attention.context_parallel import ContextAttention
from penstock.settings import ContextForm


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(8, 2, 4), (6, 4, 4), (3, 3, 2)])
def test_heads_that_ranks_cannot_share_are_refused_with_what_is_possible(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    ranks: Any = SimpleNamespace(size=num_ranks)
    one: Any = SimpleNamespace(size=1)
    with pytest.raises(ValueError, match=rf"cp={num_ranks}; possible are cp = 1\b.*'ring'"):
        ContextAttention(ContextForm.ALL_TO_ALL, ranks, num_heads, num_kv_heads)
    ContextAttention(ContextForm.RING, ranks, num_heads, num_kv_heads)
    ContextAttention(ContextForm.ALL_TO_ALL, one, num_heads, num_kv_heads)
