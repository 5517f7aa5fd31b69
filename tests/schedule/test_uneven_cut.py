"""Stages for ranks of unequal speed, against all cuts there are."""

import random
from itertools import combinations, pairwise

import pytest

from penstock.schedule import Placement, PlacementKind, balanced_cut


def slowest(borders: tuple[int, ...], times: list[float], speeds: list[float]) -> float:
    """The time of the slowest stage of a cut."""
    stages = pairwise((0, *borders, len(times)))
    return max(sum(times[a:b]) / speed for (a, b), speed in zip(stages, speeds, strict=True))


def test_the_slowest_stage_is_that_of_the_best_cut():
    for seed in range(200):
        draw = random.Random(seed)
        num_units = draw.randint(2, 9)
        num_ranks = min(num_units, draw.randint(1, 4))
        times = [float(draw.randint(0, 9)) for _ in range(num_units)]
        speeds = [float(draw.choice((1, 2, 4))) for _ in range(num_ranks)]
        cut = balanced_cut(times, Placement(PlacementKind.LOOP, num_ranks), speeds)
        assert [unit for stage in cut for unit in stage] == list(range(num_units)), seed
        assert all(cut) and len(cut) == num_ranks
        best = min(slowest(borders, times, speeds) for borders in combinations(range(1, num_units), num_ranks - 1))
        assert slowest(tuple(stage.start for stage in cut[1:]), times, speeds) == pytest.approx(best), seed


def test_fewer_units_than_ranks_are_refused():
    with pytest.raises(ValueError, match="1 units can be cut into at most 1 stages"):
        balanced_cut([1.0], Placement(PlacementKind.LOOP, 2), [1.0, 1.0])


def test_ranks_that_differ_hold_one_stage_each():
    with pytest.raises(ValueError, match="2 ranks that differ hold one stage each, not 4"):
        balanced_cut([1.0] * 8, Placement(PlacementKind.LOOP, 2, 2), [1.0, 2.0])
