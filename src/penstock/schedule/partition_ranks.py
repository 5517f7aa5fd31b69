"""Cutting a model's units for ranks of several stages: what counts is the slowest rank, not the slowest stage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from penstock.schedule.actions import Placement, PlacementKind
from penstock.schedule.partition import partition, prefix_times, ranges

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
