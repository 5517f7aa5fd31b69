"""Parts of the search: its closed skeletons are as good as they claim, and W is woven in where memory demands it."""

import random
from collections.abc import Sequence
from itertools import accumulate, islice, product

import pytest

from penstock.schedule import Placement, PlacementKind
from penstock.schedule.search.anneal import span_of
from penstock.schedule.search.order import search
from penstock.schedule.search.problem import Problem
from penstock.schedule.search.skeletons import (
    PRIORITIES,
    _place,
    by_priority,
    microbatch_by_microbatch,
    there_and_back,
    warm_ups,
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


def longest_first_wait(problem: Problem, num_live: Sequence[int]) -> float:
    """The longest time that a rank waits for its first backward, once it has run as many forwards as this."""
    hops, arrivals, ends = (0.0, *problem.hops), [0.0] * problem.num_microbatches, list[float]()
    for rank, most in enumerate(num_live):
        now, own = 0.0, list[float]()
        for arrival in arrivals[:most]:
            now = max(now, arrival + hops[rank]) + problem.forward[rank]
            own.append(now)
        arrivals = own
        ends.append(now)
    arrival = longest = 0.0
    for rank in reversed(range(problem.num_ranks)):
        longest = max(longest, arrival - ends[rank])
        arrival = max(arrival, ends[rank]) + problem.backward_input[rank] + hops[rank]
    return longest


@pytest.mark.parametrize("transfer", (0.0, 0.3))
def test_no_numbers_of_forwards_let_ranks_wait_less_for_their_first_backward_than_the_best_warm_up(transfer: float):
    numbers = [(*ahead, 1) for ahead in product(range(1, 10), repeat=3) if sorted(ahead, reverse=True) == [*ahead]]
    for seed in range(8):
        chance = random.Random(seed)
        forward, backward = (1.25,) * 4, tuple(chance.uniform(0.3, 2.5) for _ in range(4))
        problem = Problem(Placement(PlacementKind.LOOP, 4), 9, forward, backward, forward, transfer, 9.0, 0.0)
        # Before it come those of 1F1B, of twice as many, and of ranks that are all alike.
        best = next(islice(warm_ups(problem, may_wait=0.0), 4, None))
        least = min(longest_first_wait(problem, num_live) for num_live in numbers)
        assert longest_first_wait(problem, best) == pytest.approx(least, abs=1e-9), (seed, best)


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


def test_small_changes_shorten_an_order_that_is_too_long_to_be_polished():
    times = ((3.0, 2.0, 2.0), (2.0, 3.0, 2.0), (1.0, 3.0, 1.0))
    problem = Problem(Placement(PlacementKind.LOOP, 3), 47, *times, 0.0, 2.0, 1.0)
    unchanged, changed = (
        span_of(problem, [list(order) for order in search(problem, effort)]) for effort in (0.0, 0.03)
    )
    assert unchanged is not None and changed is not None
    assert changed < unchanged


@pytest.mark.parametrize("num_live", [(4, 3, 2, 1), (3, 3, 2, 1)])
def test_a_rank_has_as_many_microbatches_of_its_first_stage_live_as_it_may(num_live: tuple[int, ...]):
    problem = equal_times(Placement(PlacementKind.LOOP, 4), 8, 4, 0.0)
    for priority in PRIORITIES:
        skeleton = by_priority(problem, priority, 100.0, num_live)
        most = [max(accumulate(-1 if step & 1 else 1 for step in steps)) for steps in skeleton]
        assert tuple(most) == num_live


def test_a_rank_may_end_as_late_after_its_first_input_as_its_work_asks():
    """In a span of 0, a rank whose W is long ends when its first input comes, whatever the ranks before it wait for."""
    forward, inputs, weights, hop = (1.0, 2.0, 1.0), (2.0, 2.0, 2.0), (0.0, 10.0, 20.0), 0.5
    problem = Problem(Placement(PlacementKind.LOOP, 3), 1, forward, inputs, weights, hop, 3.0, 1.0)
    latest = latest_starts(problem, microbatch_by_microbatch(problem))
    assert latest is not None
    arrivals = (0.0, 1.0 + hop, 1.0 + hop + 2.0 + hop)
    for rank, arrival in enumerate(arrivals):
        assert latest[rank][-1] == arrival - inputs[rank] - weights[rank]
