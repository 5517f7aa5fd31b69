"""Cutting a model's units into stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

from penstock.schedule.actions import check_count


def partition(times: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """The cut of units into contiguous stages whose slowest stage is as fast as can be.

    `times` holds one time a unit, in any one unit of time. Every unit is placed once and every stage has at least one.
    Among the cuts with the fastest slowest stage the most even one is taken: that with the least sum of squared stage
    times. Both are exact, for the times are added up as whole numbers, not rounded.

    Raises: ValueError for more stages than units, or a time that is negative or not finite.
    """
    until = prefix_times(times, num_stages)
    return _most_even(until, num_stages, _least_largest(until, num_stages))


def prefix_times(times: Sequence[float], num_stages: int) -> list[int]:
    """The times of the first 0, 1, 2, ... units together, as whole numbers of a unit small enough for all of them.

    Raises: ValueError for more stages than units, or a time that is negative or not finite.
    """
    check_count("stages", num_stages)
    _check_stages(len(times), num_stages)
    for place, time in enumerate(times):
        if not isfinite(time) or time < 0:
            raise ValueError(f"unit {place} must take a time of at least 0, got {time!r}")
    exact = [Fraction(time) for time in times]
    unit = lcm(*(time.denominator for time in exact))
    return [0, *accumulate(int(time * unit) for time in exact)]


def check_cut(sizes: Sequence[int], num_units: int, num_stages: int) -> tuple[range, ...]:
    """A cut given by hand, as the number of units of each stage.

    Raises: ValueError, if it does not place every unit once, with at least one on each stage.
    """
    check_count("stages", num_stages)
    _check_stages(num_units, num_stages)
    if len(sizes) != num_stages:
        raise ValueError(f"the cut {list(sizes)} is for {len(sizes)} stages, there are {num_stages}")
    for size in sizes:
        check_count("each stage's number of units", size)
    if sum(sizes) != num_units:
        raise ValueError(f"the cut {list(sizes)} places {sum(sizes)} units, the model has {num_units}")
    return ranges([0, *accumulate(sizes)])


def _check_stages(num_units: int, num_stages: int) -> None:
    if num_stages > num_units:
        raise ValueError(f"{num_units} units can be cut into at most {num_units} stages, not into {num_stages}")


def ranges(borders: Sequence[int]) -> tuple[range, ...]:
    """The stages between borders, the first of which is 0."""
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def _least_largest(until: list[int], num_stages: int) -> int:
    """The least time that the slowest of the stages can have; `until[i]` is the time of the first i units.

    By bisection between what one unit and what all take: filling each stage as far as the limit lets it needs the
    fewest stages, and stages can always be split further as long as there are units.
    """
    low = max(after - before for before, after in pairwise(until))
    high = until[-1]
    while low < high:
        limit = (low + high) // 2
        border, num_used = 0, 0
        while border < len(until) - 1:
            # The last place with until[place] <= until[border] + limit.
            border = bisect_left(until, until[border] + limit + 1) - 1
            num_used += 1
        low, high = (low, limit) if num_used <= num_stages else (limit + 1, high)
    return low


def _most_even(until: list[int], num_stages: int, limit: int) -> tuple[range, ...]:
    """The cut with the least sum of squares whose stages all keep to the limit; among equals the first stages shortest.

    `best[i]` is the least sum for the units from i on, cut into as many stages as the round has reached, and
    `choices[round][i]` where the first of those stages ends.
    """
    num_units = len(until) - 1
    best: list[int | None] = [None] * num_units + [0]
    choices: list[list[int]] = []
    for _ in range(num_stages):
        before: list[int | None] = best
        best = [None] * (num_units + 1)
        choice = [0] * (num_units + 1)
        for start in range(num_units):
            for stop in range(start + 1, num_units + 1):
                time = until[stop] - until[start]
                if time > limit:
                    break
                rest = before[stop]
                if rest is None:
                    continue
                total = time * time + rest
                least = best[start]
                if least is None or total < least:
                    best[start], choice[start] = total, stop
        choices.append(choice)
    borders = [0]
    for choice in reversed(choices):
        borders.append(choice[borders[-1]])
    return ranges(borders)
