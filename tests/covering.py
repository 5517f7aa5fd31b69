"""Few cases that show what a product of cases shows, unless it takes three of its factors together to go wrong."""

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

EVERY = os.environ.get("PENSTOCK_EVERY_CASE") == "1"
"""True where every product is run whole: `make pytest-whole`."""


def pairs_of(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each two values of different factors meet at least once; always the same ones.

    >>> len(pairs_of("abcd", (1, 2, 3), (True, False)))
    12
    """
    every = list(product(*(range(len(factor)) for factor in factors)))
    if not EVERY:
        every = _cover(every)
    return [tuple(factor[place] for factor, place in zip(factors, case, strict=True)) for case in every]


def _cover(every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Take the case that adds most pairs, the first of several, until none adds any."""

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), 2))

    left, chosen = set().union(*map(pairs, every)), []
    while left:
        best = max(every, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen
