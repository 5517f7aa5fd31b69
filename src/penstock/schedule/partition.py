"""Cutting a model's units into stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm
from typing import NamedTuple, TypeAlias

from penstock.schedule.actions import Placement, PlacementKind, check_count


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


Cost: TypeAlias = tuple[int, ...]

Join: TypeAlias = Callable[[Cost, int, int], Cost]
"""The cost with one more rank, given the times of its two stages."""


class _State(NamedTuple):
    """The units that are left once some ranks have theirs: those from `start` until before `stop`."""

    start: int
    stop: int


_Layer: TypeAlias = dict[_State, tuple[Cost, _State]]
"""What can be left after so many ranks: at which least cost, and what was left before the last of them."""


def balanced_cut(times: Sequence[float], placement: Placement) -> tuple[range, ...]:
    """The cut of units into a placement's stages that keeps its slowest rank as fast as can be.

    Where ranks hold two stages of a V this is exact: among the cuts with the fastest slowest rank, the one with the
    least sum of squared rank times, and among those that of squared stage times. Elsewhere it is `partition`, which
    looks at stages: exact for one stage a rank, and for more a cut whose ranks are hardly less even.

    Raises: ValueError for more stages than units, or a time that is negative or not finite.
    """
    if placement.kind is not PlacementKind.V or placement.stages_per_rank != 2:
        return partition(times, placement.stages_per_route)
    num_ranks = placement.num_ranks
    until = prefix_times(times, placement.num_stages)
    limit = -(-until[-1] // num_ranks)
    margin = limit // 32 + 1
    # What is possible within a narrow limit is found fast, and the optimum is among it once there is anything.
    while (found := _best(until, num_ranks, limit, (0,), _slowest)) is None:
        limit, margin = limit + margin, 2 * margin
    (limit,), _ = found
    even = _best(until, num_ranks, limit, (0, 0), _unevenness)
    assert even is not None, "the slowest rank keeps to its own time"
    return ranges(even[1])


def _slowest(cost: Cost, first: int, second: int) -> Cost:
    return (max(cost[0], first + second),)


def _unevenness(cost: Cost, first: int, second: int) -> Cost:
    return (cost[0] + (first + second) ** 2, cost[1] + first * first + second * second)


def _best(until: list[int], num_ranks: int, limit: int, nothing: Cost, join: Join) -> tuple[Cost, list[int]] | None:
    """The least cost of a cut whose ranks all keep to the limit, and its borders; None where there is no such cut.

    `until[i]` is the time of the first i units. The first rank holds both ends of the model, the next one both ends of
    what is left, and so on: so a state is what is left, and the last rank shares the rest between its two stages.
    """
    everything = _State(0, len(until) - 1)
    layers: list[_Layer] = [{everything: (nothing, everything)}]
    for num_after in reversed(range(num_ranks)):
        layer: _Layer = {}
        for state, (cost, _) in layers[-1].items():
            for rest in _rests(until, state, num_after, limit):
                first, second = until[rest.start] - until[state.start], until[state.stop] - until[rest.stop]
                total = join(cost, first, second)
                if rest not in layer or total < layer[rest][0]:
                    layer[rest] = total, state
        layers.append(layer)
    if not layers[-1]:
        return None
    state, (cost, _) = min(layers[-1].items(), key=lambda end: (end[1][0], end[0]))
    return cost, _borders(layers, state)


def _rests(until: list[int], state: _State, num_after: int, limit: int) -> Iterator[_State]:
    """What a rank can leave to the `num_after` ranks behind it, each of which needs two units and as much time."""
    for start in range(state.start + 1, state.stop):
        spare = limit - (until[start] - until[state.start])
        if spare < 0:
            return
        least = max(start + 2 * num_after, bisect_left(until, until[state.stop] - spare))
        for stop in range(least, state.stop if num_after else start + 1):
            if until[stop] - until[start] > num_after * limit:
                break
            yield _State(start, stop)


def _borders(layers: Sequence[Mapping[_State, tuple[Cost, _State]]], state: _State) -> list[int]:
    """All ends of stages, given the state behind the last rank, in which nothing is left."""
    lower, upper = [state.start], list[int]()
    for layer in reversed(layers[1:]):
        state = layer[state][1]
        lower.append(state.start)
        upper.append(state.stop)
    return lower[::-1] + upper
