"""Parts of the search: its closed skeletons are as good as they claim, and W is woven in where memory demands it."""

import random

import pytest

from penstock.schedule import Placement, PlacementKind
from penstock.schedule.search.problem import Problem
from penstock.schedule.search.skeletons import (
    _place,
    there_and_back,
)
from penstock.schedule.search.weave import weave


def equal_times(placement: Placement, num_microbatches: int, most: float, share: float) -> Problem:
    """A problem in which every action takes 1 and messages take no time."""
    each = (1.0,) * placement.num_stages
    return Problem(placement, num_microbatches, each, each, each, 0.0, most, share)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_way_there_and_back_has_no_bubble_at_as_many_live_microbatches_as_ranks(ranks: int):
    placement = Placement(PlacementKind.V, num_ranks=ranks, stages_per_rank=2)
    for num_microbatches in (2 * ranks, 2 * ranks + 1, 4 * ranks):
        problem = equal_times(placement, num_microbatches, ranks, 0.0)
        woven = weave(problem, there_and_back(problem), allowed_span=0.0)
        assert woven is not None
        assert woven[0] == max(problem.work)


def test_an_action_of_a_pattern_starts_as_soon_as_its_rank_is_free_in_every_period():
    for seed in range(200):
        chance = random.Random(seed)
        period, taken, busy = chance.randint(4, 12), list[tuple[float, float]](), set[int]()
        for _ in range(6):
            earliest, duration = chance.randint(0, 20), chance.randint(1, 3)
            free = [
                start
                for start in range(earliest, earliest + period)
                if not busy & {(start + step) % period for step in range(duration)}
            ]
            assert _place(taken, earliest, duration, period) == (free[0] if free else None), seed
            if free:
                busy |= {(free[0] + step) % period for step in range(duration)}
