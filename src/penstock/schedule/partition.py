"""The cut of a model's units into stages: even stages, or, with two stages a rank in a V, even ranks."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, isfinite, lcm
from typing import TypeAlias

from penstock.schedule.placement import Placement, PlacementKind, check_count


def partition(times: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut units into contiguous stages whose slowest stage is as fast as possible.

    `times` has one time for each unit of the model. Every unit is placed once, and every stage gets at least one. Among
    the cuts with the fastest slowest stage, the result has the least sum of squared stage times. Both are exact: times
    are added up as whole numbers, without rounding.

    >>> partition([1.0, 1.0, 2.0, 2.0], num_stages=3)
    (range(0, 2), range(2, 3), range(3, 4))

    Raises: ValueError for more stages than units, or a time that is negative or not finite.
    """
    until = prefix_times(times, num_stages)
    return _most_even(until, num_stages, _least_largest(until, num_stages))


def prefix_times(times: Sequence[float], num_stages: int) -> list[int]:
    """The total times of the first 0, 1, 2, ... units, as whole multiples of a time that divides them all.

    Raises: ValueError for more stages than units, or a time that is negative or not finite.
    """
    check_count("stages", num_stages)
    if num_stages > len(times):
        raise ValueError(f"{len(times)} units can be cut into at most {len(times)} stages, not into {num_stages}")
    for place, time in enumerate(times):
        if not isfinite(time) or time < 0:
            raise ValueError(f"unit {place} must take a time of at least 0, got {time!r}")
    exact = [Fraction(time) for time in times]
    unit = lcm(*(time.denominator for time in exact))
    return [0, *accumulate(int(time * unit) for time in exact)]


def check_cut(sizes: Sequence[int], num_units: int, num_stages: int) -> tuple[range, ...]:
    """Turn a cut given by hand, as the number of units of each stage, into the units of each stage.

    A stage between the first and the last may have none: it hands on what it is given.

    >>> check_cut([1, 0, 3], num_units=4, num_stages=3)
    (range(0, 1), range(1, 1), range(1, 4))

    Raises: ValueError unless it places every unit once, with at least one on the first and on the last stage.
    """
    check_count("stages", num_stages)
    if len(sizes) != num_stages:
        raise ValueError(f"the cut {list(sizes)} is for {len(sizes)} stages, there are {num_stages}")
    for place, size in enumerate(sizes):
        check_count("each stage's number of units", size, least=1 if place in (0, num_stages - 1) else 0)
    if sum(sizes) != num_units:
        raise ValueError(f"the cut {list(sizes)} places {sum(sizes)} units, the model has {num_units}")
    return ranges([0, *accumulate(sizes)])


_TIMES = re.compile(r"\*(\d{1,6})")
_MOST_LETTERS = 1 << 20


def read_layout(text: str, num_units: int, units_per_layer: int) -> tuple[int, ...]:
    """The number of units of each stage, from a layout in the language of Megatron-Core's pipeline layouts.

    `|` ends a stage. `E` is the embedding, `t` a layer, `L` the head with the loss. `m` is a further predicted token:
    the head computes it, wherever it stands. `x*3` and `(tt|)*3` repeat; commas and spaces mean nothing.

    >>> read_layout("Et*3|(tt|)*2|L", num_units=16, units_per_layer=2)
    (7, 4, 4, 0, 1)

    Raises: ValueError naming the place of what cannot be read, or what the model has instead.
    """
    # The place of each open parenthesis, and the letters with their places that it holds so far.
    groups: list[tuple[int, list[tuple[str, int]]]] = [(0, [])]
    i = 0
    while i < len(text):
        letter, place = text[i], i
        piece = [(letter, place)]
        i += 1
        if letter in ", \n":
            continue
        if letter == "(":
            groups.append((place, []))
            continue
        if letter == ")" and len(groups) > 1:
            _, piece = groups.pop()
        elif letter not in "EtmL|":
            raise ValueError(f"{letter!r} at character {place + 1} is none of E, t, m, L, |, (, ) and *")
        if found := _TIMES.match(text, i):
            i = found.end()
            if len(piece) * int(found[1]) > _MOST_LETTERS:
                raise ValueError(
                    f"{found[0]!r} at character {found.start() + 1} makes more letters than {_MOST_LETTERS}"
                )
            piece = piece * int(found[1])
        groups[-1][1].extend(piece)
    begin, letters = groups.pop()
    if groups:
        raise ValueError(f"the parenthesis at character {begin + 1} has no end")
    return _sizes_of(letters, num_units, units_per_layer)


def _sizes_of(layout: Sequence[tuple[str, int]], num_units: int, units_per_layer: int) -> tuple[int, ...]:
    """The units of each stage of a layout, whose letters have their places."""
    order, last = "EtmL", ""
    for letter, place in layout:
        if letter != "|":
            if last and (order.index(letter) < order.index(last) or (letter == last and letter in "EL")):
                raise ValueError(
                    f"{letter!r} at character {place + 1} comes after {last!r}; the order is E, then every t, then "
                    "every m, then L"
                )
            last = letter
    letters = "".join(letter for letter, _ in layout)
    num_layers, rest = letters.count("t"), num_units - letters.count("E") - letters.count("L")
    if num_layers * units_per_layer != rest:
        ends = [own for own in "EL" if own in letters]
        besides = f" besides {' and '.join(ends)}" if ends else ""
        raise ValueError(
            f"it has {num_layers} t, each a layer of {units_per_layer} of the model's units, of which there are {rest}"
            f"{besides}"
        )
    each = {"E": 1, "t": units_per_layer, "m": 0, "L": 1}
    return tuple(sum(each[letter] for letter in stage) for stage in letters.split("|"))


def ranges(borders: Sequence[int]) -> tuple[range, ...]:
    """The stages between borders; the first border is 0."""
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def _least_largest(until: list[int], num_stages: int) -> int:
    """Find the least time that the slowest stage can have; `until[i]` is the time of the first i units.

    This is a bisection between the slowest unit and all units. Filling each stage up to the limit needs the fewest
    stages, and stages can be split further as long as there are units.
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
    """Find the cut with the least sum of squares whose stages keep to the limit; ties go to the shortest first stages.

    After round r, `best[i]` is the least sum for the units from i on, cut into r stages, and `choices[r][i]` the end of
    the first of those stages. A first stage ends no earlier if it begins later, and no later if more stages follow, so
    few ends need a look.

    Source: Yao, Efficient Dynamic Programming Using Quadrangle Inequalities (STOC 1980), theorem 1.
    """
    num_units = len(until) - 1
    best: list[int | None] = [None] * num_units + [0]
    choice = [num_units] * num_units
    choices: list[list[int]] = []
    for num_after in range(num_stages):
        before: list[int | None] = best
        latest = choice
        best = [None] * (num_units + 1)
        choice = [num_units] * num_units
        earliest = 0
        for start in range(num_stages - 1 - num_after, num_units - num_after):
            # Where the rest was too long for the stages after, nothing is known of its end.
            last = latest[start] if before[start] is not None else num_units
            for stop in range(max(earliest, start + 1), last + 1):
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
            if best[start] is not None:
                earliest = choice[start]
        choices.append(choice)
    borders = [0]
    for choice in reversed(choices):
        borders.append(choice[borders[-1]])
    return ranges(borders)


Cost: TypeAlias = tuple[int, ...]

Join: TypeAlias = Callable[[Cost, int, int], Cost]
"""Adds a rank to a cost, given the times of its two stages."""


_State: TypeAlias = tuple[int, int]
"""The units left once some ranks have theirs: the first, and the one behind the last."""

_Repeats: TypeAlias = list[tuple[int, int]]
"""By unit an earlier one, and how many units from there on take the same times as from this one on."""

_Layer: TypeAlias = dict[_State, tuple[Cost, list[_State]]]
"""State before a rank -> the least cost of the ranks from this one on, and the states to which it may leave for it."""


def balanced_cut(times: Sequence[float], placement: Placement, speeds: Sequence[float] = ()) -> tuple[range, ...]:
    """Cut units into a placement's stages so that the slowest rank is as fast as possible.

    For two stages a rank in a V this is exact: among the cuts with the fastest slowest rank, the result has the least
    sum of squared rank times, and among those the least sum of squared stage times. For other placements the result is
    that of `partition`, which balances stages: exact for one stage a rank, and nearly as even for more.

    >>> balanced_cut([1.0, 1.0, 1.0, 1.0, 4.0], Placement(PlacementKind.V, num_ranks=2, stages_per_rank=2))
    (range(0, 1), range(1, 2), range(2, 4), range(4, 5))

    Where ranks differ, `speeds` has a number for each, and each has one stage: that takes its units' `times` over its
    rank's speed. Among equally fast cuts, the earlier ranks get fewer units.

    >>> balanced_cut([1.0] * 6, Placement(PlacementKind.LOOP, num_ranks=2), speeds=[2.0, 1.0])
    (range(0, 4), range(4, 6))

    Raises: ValueError for more stages than units, a time that is negative or not finite, or ranks that differ and have
        several stages.
    """
    if speeds:
        if placement.stages_per_route != len(speeds):
            raise ValueError(f"{len(speeds)} ranks that differ hold one stage each, not {placement.stages_per_route}")
        return _uneven(times, speeds)
    if placement.kind is not PlacementKind.V or placement.stages_per_rank != 2:
        return partition(times, placement.stages_per_route)
    num_ranks = placement.num_ranks
    until = prefix_times(times, placement.num_stages)
    repeats = _repeats(until)
    limit = -(-until[-1] // num_ranks)
    margin = limit // 32 + 1
    # A narrow limit makes the search fast; once any cut keeps to it, the best one does.
    while (found := _best(until, repeats, num_ranks, limit, (0,), lambda cost, a, b: (max(cost[0], a + b),))) is None:
        limit, margin = limit + margin, 2 * margin
    (limit,), _ = found
    squares: Join = lambda cost, a, b: (cost[0] + (a + b) ** 2, cost[1] + a * a + b * b)  # noqa: E731
    even = _best(until, repeats, num_ranks, limit, (0, 0), squares)
    assert even is not None, "the slowest rank keeps to its own time"
    return ranges(even[1])


def _repeats(until: list[int]) -> _Repeats:
    """Find of each unit the earlier one from which on the most units take the same times."""
    times = [after - before for before, after in pairwise(until)]
    found, alike = list[tuple[int, int]](), [0] * len(times)
    for place in reversed(range(len(times))):
        alike = [alike[i + 1] + 1 if times[i] == times[place] else 0 for i in range(place)]
        earlier = max(range(place), key=alike.__getitem__, default=0)
        found.append((earlier, alike[earlier] if place else 0))
    return found[::-1]


def _best(
    until: list[int], repeats: _Repeats, num_ranks: int, limit: int, nothing: Cost, join: Join
) -> tuple[Cost, list[int]] | None:
    """Find the least cost of a cut whose ranks all keep to the limit, and its borders; None if no cut does.

    `until[i]` is the time of the first i units. The first rank holds both ends of the model, the next rank both ends of
    the rest, and so on, so a state is the rest; the last rank divides it between its two stages. Its cost follows from
    the times of its units, which a model repeats from layer to layer: of rests that are alike, one is looked at.
    """

    def first_like(state: _State) -> _State:
        earlier, num_units = repeats[state[0]]
        size = state[1] - state[0]
        return (earlier, earlier + size) if size <= num_units else state

    everything = 0, len(until) - 1
    states: list[set[_State]] = [{everything}]
    for num_after in reversed(range(1, num_ranks)):
        states.append({first_like(rest) for state in states[-1] for rest in _rests(until, state, num_after, limit)})
    layers: list[_Layer] = []
    for num_after, of_rank in enumerate(reversed(states)):
        layer: _Layer = {}
        for state in of_rank:
            for rest in _rests(until, state, num_after, limit):
                after = layers[-1].get(first_like(rest)) if num_after else (nothing, [])
                if after is None:
                    continue
                cost = join(after[0], until[rest[0]] - until[state[0]], until[state[1]] - until[rest[1]])
                if state not in layer or cost < layer[state][0]:
                    layer[state] = cost, [rest]
                elif cost == layer[state][0]:
                    layer[state][1].append(rest)
        layers.append(layer)
    if everything not in layers[-1]:
        return None
    return layers[-1][everything][0], _borders(layers, everything, first_like)


def _borders(layers: list[_Layer], everything: _State, first_like: Callable[[_State], _State]) -> list[int]:
    """The borders of a cut of the least cost; of several, the last rank begins the earliest, then the one before it."""
    # State after some ranks -> the first one before the last of them.
    steps = [{everything: everything}]
    for layer in reversed(layers):
        step: dict[_State, _State] = {}
        for state in sorted(steps[-1]):
            like = first_like(state)
            for first, end in layer[like][1]:
                step.setdefault((state[0] + first - like[0], state[0] + end - like[0]), state)
        steps.append(step)
    state = min(steps[-1])
    lower, upper = [state[0]], list[int]()
    for step in reversed(steps[1:]):
        state = step[state]
        lower.append(state[0])
        upper.append(state[1])
    return lower[::-1] + upper


def _rests(until: list[int], state: _State, num_after: int, limit: int) -> Iterator[_State]:
    """Yield the states that a rank can leave to the `num_after` ranks after it, each of which needs two units."""
    first, end = state
    for start in range(first + 1, end):
        spare = limit - (until[start] - until[first])
        if spare < 0:
            return
        least = max(start + 2 * num_after, bisect_left(until, until[end] - spare))
        for stop in range(least, end if num_after else start + 1):
            if until[stop] - until[start] > num_after * limit:
                break
            yield start, stop


def _uneven(times: Sequence[float], speeds: Sequence[float]) -> tuple[range, ...]:
    """The cut for ranks that differ; see `balanced_cut`."""
    until, num_units = prefix_times(times, len(speeds)), len(times)
    # The slowest stage of the best cut of the first units among the ranks so far, by their number.
    slowest, begins = [0.0] + [inf] * num_units, list[list[int]]()
    for speed in speeds:
        best, begin_of = [inf] * (num_units + 1), [0] * (num_units + 1)
        for end in range(1, num_units + 1):
            for begin in range(end):
                found = max(slowest[begin], (until[end] - until[begin]) / speed)
                if found < best[end]:
                    best[end], begin_of[end] = found, begin
        slowest = best
        begins.append(begin_of)
    borders = [num_units]
    for begin_of in reversed(begins):
        borders.append(begin_of[borders[-1]])
    return ranges(borders[::-1])
