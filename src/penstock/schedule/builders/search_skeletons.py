"""Skeletons from closed forms: one forward one backward after any warm-up, the V without bubble, repeated patterns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import floor
from typing import NamedTuple

from penstock.schedule.builders.search_problem import TOLERANCE, Codes, Problem

# How many warm-ups are kept while they are put together from the last rank to the first.
_BEAM = 128


def one_f_one_b(problem: Problem, num_live: Sequence[int]) -> Codes:
    """One stage a rank: forwards until `num_live` microbatches are live, then backwards and forwards in turn."""
    skeleton = []
    for stage, most in enumerate(num_live):
        most = min(most, problem.num_microbatches)
        pairs = [2 * stage + 1, 2 * stage] * (problem.num_microbatches - most)
        skeleton.append([2 * stage] * most + pairs + [2 * stage + 1] * most)
    return skeleton


class _WarmUp(NamedTuple):
    """The last ranks' numbers of live microbatches, and what they mean for the rank before.

    `wait` is the longest that one of them waits for its first I, `ready` the time from the end of the first F to the
    start of the first I on the first of them.
    """

    wait: float
    ready: float
    numbers: tuple[int, ...]


def warm_ups(problem: Problem, may_wait: float) -> Iterator[tuple[int, ...]]:
    """Numbers of live microbatches for `one_f_one_b`, the most promising first.

    A rank whose first backward comes t after the end of its first forward can fill t with whole forwards and wait for
    the rest, or run one forward more and let its first backward, and those of all ranks before it, be late: then it
    need not wait. First come 1F1B's numbers and twice as many, then those of ranks that all wait or are all late; then
    for each rank both are tried. Best are the numbers with which no rank waits for longer than `may_wait`, or else for
    the least time, and of those the ones with which backwards come early.
    """
    num_ranks = problem.num_ranks
    most = [problem.num_microbatches] * num_ranks
    if problem.max_whole_tapes < problem.num_microbatches:
        # What a rank has beyond its predecessor's memory it would get only after that one's first backward.
        most = [max(1, problem.max_whole_tapes - rank) for rank in range(num_ranks)]
    yield tuple(min(most[rank], num_ranks - rank) for rank in range(num_ranks))
    yield tuple(min(most[rank], 2 * (num_ranks - rank) - 1) for rank in range(num_ranks))
    none = _WarmUp(may_wait, 0.0, (1,))
    for choice in (0, 1):
        alike = none
        for rank in range(num_ranks - 2, -1, -1):
            alike = _one_rank_more(problem, rank, most[rank], alike)[choice]
        yield alike.numbers
    found = [none]
    for rank in range(num_ranks - 2, -1, -1):
        longer = (more for later in found for more in _one_rank_more(problem, rank, most[rank], later))
        found = sorted(set(longer))[:_BEAM]
    for warm_up in found:
        yield warm_up.numbers


def _one_rank_more(problem: Problem, rank: int, most: int, later: _WarmUp) -> list[_WarmUp]:
    """What a rank can do in front of later ones: wait, be late, or have one microbatch more than the next."""
    forward = problem.forward[rank]
    ready = later.ready + problem.forward[rank + 1] + problem.backward_input[rank + 1] + 2 * problem.hops[rank]
    whole = floor(ready / forward + TOLERANCE) if forward > 0 else most
    choices = []
    for num_more in (whole, whole + 1, later.numbers[0]):
        live = min(num_more + 1, most)
        filled = (live - 1) * forward
        choices.append(_WarmUp(max(later.wait, ready - filled), max(ready, filled), (live, *later.numbers)))
    return choices


def there_and_back(problem: Problem) -> Codes:
    """Two stages a rank in a V: without bubble at 2p tapes, where all actions take equal times.

    A rank runs first stages until a microbatch comes back, then both stages in turn until the first backward arrives;
    from then on each forward is followed by a backward.

    Source: ZB-V, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6.
    """
    skeleton = []
    for rank, (first, second) in enumerate(problem.stages_of):
        to_last = problem.num_ranks - 1 - rank
        order = [2 * first] * (2 * to_last) + [2 * first, 2 * second] * (rank + 1)
        order += [2 * second + 1, 2 * second] * to_last
        order += [2 * second + 1, 2 * first, 2 * first + 1, 2 * second] * problem.num_microbatches
        skeleton.append(_complete(order, first, second, problem.num_microbatches))
    return skeleton


def _complete(order: Sequence[int], first: int, second: int, num_microbatches: int) -> list[int]:
    """The order without what comes too often or before it is possible, and with what is then missing at the end."""
    steps = [2 * first, 2 * second, 2 * second + 1, 2 * first + 1]
    done = [num_microbatches, 0, 0, 0, 0]
    kept = []
    for step in [*order, *steps[1:] * num_microbatches]:
        place = steps.index(step) + 1
        if done[place] < done[place - 1]:
            done[place] += 1
            kept.append(step)
    return kept


@dataclass(frozen=True, slots=True)
class Pattern:
    """When one microbatch starts each F (`forward`) and I (`backward`) of its way; the next follows a `period` later.

    `tapes` is the highest mean of live tapes of a rank.
    """

    period: float
    length: float
    tapes: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def skeleton(self, problem: Problem) -> Codes:
        """The orders in which the ranks meet the actions of microbatches that follow each other at the period."""
        skeleton = []
        for stages in problem.stages_of:
            starts = [(start[stage], 2 * stage + op) for stage in stages for op, start in enumerate(self._starts)]
            numbers = range(problem.num_microbatches)
            timed = sorted((start + number * self.period, step) for start, step in starts for number in numbers)
            skeleton.append([step for _, step in timed])
        return skeleton

    @property
    def _starts(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.forward, self.backward


def patterns(problem: Problem) -> list[Pattern]:
    """Patterns without collisions that keep a rank busy all the time, within the memory, the shortest first.

    The way of a microbatch is laid out action by action, each as early as its rank is free at that time of the period;
    what is varied is how long a microbatch waits at each rank of a lap, and between two laps, in units of a forward.

    Source: the building blocks of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3.
    """
    laps = problem.placement.stages_per_rank
    unit = sum(problem.forward) / problem.num_stages
    period = max(problem.work) / problem.num_microbatches
    if min(period, unit) <= 0 or laps > 3:
        return []  # with more laps there are too many ways to wait
    waits = (0, 1, 2) if laps < 3 else (0, 1)
    found = {}
    for numbers in product(waits, repeat=4 * laps - 1):
        pattern = _lay_out(problem, period, [unit * number for number in numbers])
        if pattern is not None and pattern.tapes <= problem.max_tapes + TOLERANCE:
            found.setdefault((round(pattern.length / unit, 6), round(pattern.tapes, 6)), pattern)
    return [found[key] for key in sorted(found)]


def _lay_out(problem: Problem, period: float, waits: Sequence[float]) -> Pattern | None:
    """One microbatch's way; `waits` has one number for each lap there and back, then one for each turn between laps."""
    num_stages, num_ranks = problem.num_stages, problem.num_ranks
    laps = problem.placement.stages_per_rank
    taken: list[list[tuple[float, float]]] = [[] for _ in range(num_ranks)]
    starts: tuple[list[float], list[float]] = ([0.0] * num_stages, [0.0] * num_stages)
    time = 0.0
    for place in range(2 * num_stages):
        backward = place >= num_stages
        stage = 2 * num_stages - 1 - place if backward else place
        lap, behind_turn = divmod(place, num_ranks)
        if place:
            time += waits[lap] if behind_turn else waits[2 * laps + lap - 1]
        duration = (problem.backward_input if backward else problem.forward)[stage]
        start = _place(taken[problem.rank_of[stage]], time, duration, period)
        if start is None:
            return None
        starts[backward][stage] = start
        time = start + duration
        if backward and stage:
            time += problem.hops[stage - 1]
        elif not backward:
            time += problem.hops[stage]
    return Pattern(period, time, _mean_tapes(problem, period, starts), tuple(starts[0]), tuple(starts[1]))


def _place(taken: list[tuple[float, float]], time: float, duration: float, period: float) -> float | None:
    """The earliest start from a time on at which a rank is free in every period; None, if there is none."""
    for _ in range(2 * len(taken) + 1):
        for other, length in taken:
            behind = (time - other) % period
            if behind > period - TOLERANCE:
                behind = 0.0
            if behind < length - TOLERANCE:
                time += length - behind
                break
            if behind + duration > period + TOLERANCE:
                time += period - behind + length
                break
        else:
            taken.append((time % period, duration))
            return time
    return None


def _mean_tapes(problem: Problem, period: float, starts: tuple[list[float], list[float]]) -> float:
    weight = problem.weight_memory_share
    return max(
        sum(
            starts[1][stage]
            + problem.backward_input[stage]
            - starts[0][stage]
            + weight * problem.backward_weight[stage]
            for stage in stages
        )
        / period
        for stages in problem.stages_of
    )


def one_at_a_time(problem: Problem) -> Codes:
    """Each microbatch all the way before the next begins: it fits in any memory."""
    stages_of = problem.stages_of
    once = [[2 * stage for stage in own] + [2 * stage + 1 for stage in reversed(own)] for own in stages_of]
    return [steps * problem.num_microbatches for steps in once]
