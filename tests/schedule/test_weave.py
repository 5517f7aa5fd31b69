"""Parts of the search: its closed skeletons are as good as they claim, and W is woven in where memory demands it."""

import random

import pytest

from penstock.schedule import Placement, PlacementKind
from penstock.schedule.search.problem import Problem
from penstock.schedule.search.skeletons import (
    _place,
    microbatch_by_microbatch,
    there_and_back,
)
from penstock.schedule.search.weave import _forced_weight_time, latest_starts, weave


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


@pytest.mark.parametrize("most", (2.0, 2.5, 3.0, 4.0))
@pytest.mark.parametrize("share", (0.25, 0.5, 1.0))
def test_time_is_kept_for_each_weight_backward_that_memory_forces(most: float, share: float):
    """On a rank that never waits, W run only where memory forces them, and at the end."""
    num_microbatches, chance = 12, random.Random(0)
    problem = equal_times(Placement(PlacementKind.LOOP, num_ranks=1), num_microbatches, most, share)
    num_live = int(most)
    full = [0] * num_live + [1, 0] * (num_microbatches - num_live) + [1] * num_live
    for steps in (full, *(any_steps(num_microbatches, num_live, chance) for _ in range(9))):
        woven = weave(problem, [steps], allowed_span=0.0)
        assert woven is not None
        forced, number = [], 0
        for code in woven[1][0]:
            number += code == 2
            if code != 2:
                forced.append(float(number))
                number = 0
        assert _forced_weight_time(problem, 0, steps) == forced
        assert sum(forced) > 0 or steps is not full


def any_steps(num_microbatches: int, most_live: int, chance: random.Random) -> list[int]:
    """Forwards (0) and backwards (1) of one stage in any order in which no more are live."""
    steps: list[int] = []
    while len(steps) < 2 * num_microbatches:
        live = steps.count(0) - steps.count(1)
        may_forward = steps.count(0) < num_microbatches and live < most_live
        steps.append(0 if may_forward and (not live or chance.random() < 0.5) else 1)
    return steps


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


def test_a_rank_may_end_as_late_after_its_first_input_as_its_work_asks():
    """In a span of 0, a rank whose W is long ends when its first input comes, whatever the ranks before it wait for."""
    forward, inputs, weights, hop = (1.0, 2.0, 1.0), (2.0, 2.0, 2.0), (0.0, 10.0, 20.0), 0.5
    problem = Problem(Placement(PlacementKind.LOOP, 3), 1, forward, inputs, weights, hop, 3.0, 1.0)
    latest = latest_starts(problem, microbatch_by_microbatch(problem))
    assert latest is not None
    arrivals = (0.0, 1.0 + hop, 1.0 + hop + 2.0 + hop)
    for rank, arrival in enumerate(arrivals):
        assert latest[rank][-1] == arrival - inputs[rank] - weights[rank]
