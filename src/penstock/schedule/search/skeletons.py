"""Skeletons from closed forms: one forward one backward after any warm-up, the V without bubble, repeated patterns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import floor, inf
from typing import NamedTuple

from penstock.schedule.search.problem import TOLERANCE, Codes, Problem

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


@dataclass(frozen=True, slots=True)
class Priority:
    """What a rank takes first.

    With `backward_first` an I, else an F if the last was an I and the other way round. Among several the one of the
    oldest microbatch with `oldest_first`, else the one whose stage is deepest in the model.
    """

    backward_first: bool
    oldest_first: bool


PRIORITIES = tuple(
    Priority(backward_first, oldest_first) for backward_first in (True, False) for oldest_first in (False, True)
)


def dispatch(problem: Problem, priority: Priority, allowed_span: float, num_live: Sequence[int] | None = None) -> Codes:
    """The skeleton that comes of running all ranks by a priority, W where a rank would wait (as in `weave`).

    With `num_live` the first stage of a rank has no more microbatches live than that.

    No rank gets stuck: a forward leaves room for the tapes of the rank's later stages. So the microbatch that has come
    farthest always finds room for its next forward: each tape on that rank is of an earlier stage, and the last of them
    to be made left room for this one.
    """
    dispatching = _Dispatching(problem, priority, allowed_span)
    if num_live is not None:
        dispatching.most.update((stages[0], most) for stages, most in zip(problem.stages_of, num_live))
    while dispatching.wakes:
        dispatching.wake()
    return dispatching.skeleton


class _Dispatching:
    """All ranks at one time, which goes from each moment at which a rank can start something to the next."""

    def __init__(self, problem: Problem, priority: Priority, allowed_span: float) -> None:
        num_ranks, placement = problem.num_ranks, problem.placement
        self.problem, self.priority = problem, priority
        self.arrivals: list[list[float]] = [[] for _ in range(2 * problem.num_stages)]
        self.arrivals[0] = [0.0] * problem.num_microbatches
        self.done = [0] * (2 * problem.num_stages)
        self.free = [0.0] * num_ranks  # when the rank's last action ends
        self.live = [0] * num_ranks
        self.last_backward = [True] * num_ranks
        self.may_idle = [allowed_span - work + TOLERANCE for work in problem.work]
        self.waiting: list[deque[int]] = [deque() for _ in range(num_ranks)]
        self.skeleton: Codes = [[] for _ in range(num_ranks)]
        # The room that each stage's forward has to leave: one tape for each later stage of its rank.
        later = {stage: len(own) - 1 - lap for own in problem.stages_of for lap, stage in enumerate(own)}
        self.room = [problem.max_tapes - later[stage] + TOLERANCE for stage in range(placement.num_stages)]
        self.most: dict[int, int] = {}
        self.wakes: list[tuple[float, int]] = [(0.0, 0)]

    def wake(self) -> None:
        """Let the next rank do something, if it is free and finds anything."""
        time, rank = heappop(self.wakes)
        if time < self.free[rank] - TOLERANCE:
            return  # busy; it looks again when it is free
        step, next_arrival, needs_memory = self._choose(rank, time)
        waiting = self.waiting[rank]
        if step is not None and not needs_memory:
            self._run(rank, step, max(time, self.free[rank]))
        elif waiting:
            gap = next_arrival - time
            waited = time - self.free[rank]
            if needs_memory or gap >= self._weight(rank) - TOLERANCE or waited + gap > self.may_idle[rank]:
                self._occupy(rank, max(time, self.free[rank]), self._weight(rank))
                waiting.popleft()

    def _weight(self, rank: int) -> float:
        return self.problem.backward_weight[self.waiting[rank][0]]

    def _choose(self, rank: int, time: float) -> tuple[int | None, float, bool]:
        """The best step that could start now, when the next input arrives, and whether W must make room first."""
        best: tuple[tuple[bool, int], int, bool] | None = None
        next_arrival = inf
        tapes = self.live[rank] + 1
        weights = self.problem.weight_memory_share * len(self.waiting[rank])
        forward_turn = self.last_backward[rank] and not self.priority.backward_first
        for stage in self.problem.stages_of[rank]:
            for step in (2 * stage, 2 * stage + 1):
                number, arrivals = self.done[step], self.arrivals[step]
                if number == len(arrivals):
                    continue
                forward = not step & 1
                if forward and (tapes > self.room[stage] or self._full(stage)):
                    continue
                if arrivals[number] > time + TOLERANCE:
                    next_arrival = min(next_arrival, arrivals[number])
                    continue
                key = forward != forward_turn, number if self.priority.oldest_first else -stage
                if best is None or key < best[0]:
                    best = key, step, forward and tapes + weights > self.room[stage]
        return (None, next_arrival, False) if best is None else (best[1], next_arrival, best[2])

    def _full(self, stage: int) -> bool:
        """Whether a stage has as many live microbatches as it may."""
        return stage in self.most and self.done[2 * stage] - self.done[2 * stage + 1] >= self.most[stage]

    def _run(self, rank: int, step: int, time: float) -> None:
        problem, stage = self.problem, step >> 1
        backward = bool(step & 1)
        duration = (problem.backward_input if backward else problem.forward)[stage]
        self._occupy(rank, time, duration)
        self.skeleton[rank].append(step)
        self.done[step] += 1
        self.last_backward[rank] = backward
        if backward:
            self.live[rank] -= 1
            self.waiting[rank].append(stage)
        else:
            self.live[rank] += 1
        if (following := problem.following[step]) is not None:
            arrival = time + duration + following.hop
            self.arrivals[following.step].append(arrival)
            heappush(self.wakes, (arrival, following.rank))

    def _occupy(self, rank: int, time: float, duration: float) -> None:
        """Let a rank be busy from now on; what it waited for before counts as idle, unless it had not begun."""
        if self.skeleton[rank]:
            self.may_idle[rank] -= time - self.free[rank]
        self.free[rank] = time + duration
        heappush(self.wakes, (self.free[rank], rank))
