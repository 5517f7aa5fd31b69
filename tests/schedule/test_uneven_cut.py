"""Stages for ranks of unequal speed and memory, against all cuts there are."""

import random
from itertools import combinations

import pytest

from penstock.schedule import Placement, PlacementKind, balanced_cut


def cut_for(times: list[float], sizes: list[float], speeds: list[float], rooms: list[float]) -> tuple[range, ...]:
    return balanced_cut(times, Placement(PlacementKind.LOOP, len(speeds)), speeds, sizes, rooms)


def slowest_of_all(times: list[float], sizes: list[float], speeds: list[float], rooms: list[float]) -> float | None:
    """The time of the slowest stage in the best of all cuts that fit; None if none does."""
    found = []
    for borders in combinations(range(1, len(times)), len(speeds) - 1):
        stages = list(zip((0, *borders), (*borders, len(times)), strict=True))
        if all(sum(sizes[a:b]) <= room for (a, b), room in zip(stages, rooms, strict=True)):
            found.append(max(sum(times[a:b]) / speed for (a, b), speed in zip(stages, speeds, strict=True)))
    return min(found, default=None)


def test_the_slowest_stage_is_that_of_the_best_cut_that_fits():
    for seed in range(200):
        draw = random.Random(seed)
        num_units, num_ranks = draw.randint(2, 9), draw.randint(1, 4)
        if num_ranks > num_units:
            num_ranks = num_units
        times = [float(draw.randint(0, 9)) for _ in range(num_units)]
        sizes = [float(draw.randint(0, 9)) for _ in range(num_units)]
        speeds = [float(draw.choice((1, 2, 4))) for _ in range(num_ranks)]
        rooms = [float(draw.randint(5, 30)) for _ in range(num_ranks)]
        best = slowest_of_all(times, sizes, speeds, rooms)
        if best is None:
            with pytest.raises(ValueError, match="do not fit into"):
                cut_for(times, sizes, speeds, rooms)
            continue
        cut = cut_for(times, sizes, speeds, rooms)
        assert [unit for stage in cut for unit in stage] == list(range(num_units)), seed
        assert all(cut) and len(cut) == num_ranks
        assert all(sum(sizes[unit] for unit in stage) <= room for stage, room in zip(cut, rooms, strict=True))
        slowest = max(sum(times[unit] for unit in stage) / speed for stage, speed in zip(cut, speeds, strict=True))
        assert slowest == pytest.approx(best), seed


def test_fewer_units_than_ranks_are_refused():
    with pytest.raises(ValueError, match="1 units of"):
        cut_for([1.0], [1.0], [1.0, 1.0], [9.0, 9.0])


def test_ranks_that_differ_hold_one_stage_each():
    with pytest.raises(ValueError, match="2 ranks that differ hold one stage each, not 4"):
        balanced_cut([1.0] * 8, Placement(PlacementKind.LOOP, 2, 2), [1.0, 2.0], [1.0] * 8, [9.0, 9.0])
