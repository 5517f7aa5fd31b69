"""Skeletons: orders of forwards and input backwards, from closed forms, repeated patterns and heuristics.

Closed forms are one forward, one backward after any warm-up, and the V without bubble. By a heuristic every rank takes
the best of the steps it could start (`dispatch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import floor, inf
from typing import NamedTuple

from penstock.schedule.search.problem import TOLERANCE, Codes, Problem

# The number of warm-ups kept while they are built from the last rank to the first.
_BEAM = 128


def alternating(problem: Problem, num_live: Sequence[int]) -> Codes:
    """One stage a rank: forwards until `num_live` microbatches are live, then backwards and forwards in turn."""
    skeleton = []
    for stage, most in enumerate(num_live):
        most = min(most, problem.num_microbatches)
        pairs = [2 * stage + 1, 2 * stage] * (problem.num_microbatches - most)
        skeleton.append([2 * stage] * most + pairs + [2 * stage + 1] * most)
    return skeleton


class _WarmUp(NamedTuple):
    """The numbers of live microbatches on the last ranks, and their consequences for the rank before."""

    #: The longest time that one of the ranks waits for its first I.
    wait: float
    #: On the first of them, the time from the end of the first F to the start of the first I.
    ready: float
    numbers: tuple[int, ...]


def warm_ups(problem: Problem, may_wait: float) -> Iterator[tuple[int, ...]]:
    """Numbers of live microbatches for `one_f_one_b`, the most promising first.

    A rank whose first backward comes t after the end of its first forward has two choices. It can fill t with whole
    forwards and wait for the rest. Or it can run one more forward without waiting; then its first backward, and those
    of all ranks before it, are late. First come 1F1B's numbers and twice as many, then those of ranks that all wait or
    are all late; then both choices are tried for each rank. The best numbers let no rank wait longer than `may_wait`,
    or else wait the least, and among those let backwards come early.
    """
    num_ranks = problem.num_ranks
    most = [problem.num_microbatches] * num_ranks
    if problem.max_whole_tapes < problem.num_microbatches:
        # A microbatch beyond its predecessor's memory would reach a rank only after that one's first backward.
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
    """The choices of a rank before later ones: wait, be late, or have one more microbatch than the next."""
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
    """Order two stages a rank in a V: no bubble at 2p tapes, if all actions take equal times.

    A rank runs its first stage until a microbatch comes back, then both stages in turn until the first backward
    arrives; from then on a backward follows each forward.

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
    """Drop the steps that come too often or too early, and add missing ones at the end."""
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
    """The starts of one microbatch's F and I; the next microbatch follows a period later."""

    period: float
    #: The time from a microbatch's first F to its last I.
    length: float
    #: The highest mean of live tapes of a rank.
    tapes: float
    #: The start of F on each stage.
    forward: tuple[float, ...]
    #: The start of I on each stage.
    backward: tuple[float, ...]

    def skeleton(self, problem: Problem) -> Codes:
        """The order of each rank's actions if microbatches start a period apart."""
        skeleton = []
        for stages in problem.stages_of:
            starts = [
                (start[stage], 2 * stage + op)
                for stage in stages
                for op, start in enumerate((self.forward, self.backward))
            ]
            numbers = range(problem.num_microbatches)
            timed = sorted((start + number * self.period, step) for start, step in starts for number in numbers)
            skeleton.append([step for _, step in timed])
        return skeleton


def patterns(problem: Problem) -> list[Pattern]:
    """Find patterns without collisions that keep a rank busy all the time, within the memory, the shortest first.

    A microbatch is laid out action by action, each as early as its rank is free at that time of the period. The
    patterns differ in how long a microbatch waits at each rank of a lap, and between two laps, in units of a forward.

    Source: the building blocks of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3.
    """
    laps = problem.placement.stages_per_rank
    unit = sum(problem.forward) / problem.num_stages
    period = max(problem.work) / problem.num_microbatches
    if min(period, unit) <= 0 or laps > 3 or problem.placement.homes:
        return []  # with more laps there are too many ways to wait, and a map has none
    waits = (0, 1, 2) if laps < 3 else (0, 1)
    found = {}
    for numbers in product(waits, repeat=4 * laps - 1):
        pattern = _lay_out(problem, period, [unit * number for number in numbers])
        if pattern is not None and pattern.tapes <= problem.max_tapes + TOLERANCE:
            found.setdefault((round(pattern.length / unit, 6), round(pattern.tapes, 6)), pattern)
    return [found[key] for key in sorted(found)]


def _lay_out(problem: Problem, period: float, waits: Sequence[float]) -> Pattern | None:
    """Lay out one microbatch; `waits` has a number for each lap there and back, then for each turn."""
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
    """Find and take the earliest start from `time` on at which a rank is free in every period, if any."""
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


def microbatch_by_microbatch(problem: Problem) -> Codes:
    """Run each microbatch all the way before the next begins, which fits in any memory."""
    stages_of = problem.stages_of
    once = [[2 * stage for stage in own] + [2 * stage + 1 for stage in reversed(own)] for own in stages_of]
    return [steps * problem.num_microbatches for steps in once]


@dataclass(frozen=True, slots=True)
class Priority:
    """The preference among the steps that a rank could start."""

    #: Prefer an I; else F and I in turn.
    backward_first: bool
    #: Among several, prefer the oldest microbatch; else the stage deepest in the model.
    oldest_first: bool


PRIORITIES = tuple(
    Priority(backward_first, oldest_first) for backward_first in (True, False) for oldest_first in (False, True)
)


def by_priority(
    problem: Problem, priority: Priority, allowed_span: float, num_live: Sequence[int] | None = None
) -> Codes:
    """Run all ranks by a priority, with W where a rank would wait (as in `weave`), and return the skeleton.

    `num_live` limits the live microbatches of each rank's first stage.

    No rank gets stuck, because a forward leaves room for the tapes of the rank's later stages. So the farthest
    microbatch always finds room for its next forward: every tape on that rank belongs to an earlier stage, and the last
    one made left room for this one.
    """
    dispatching = _Dispatching(problem, priority, allowed_span)
    if num_live is not None:
        dispatching.most.update((stages[0], most) for stages, most in zip(problem.stages_of, num_live))
    while dispatching.wakes:
        dispatching.wake()
    return dispatching.skeleton


class _Dispatching:
    """All ranks in a run that goes from each moment at which a rank can start something to the next."""

    #: By step, the arrivals of its inputs so far.
    arrivals: list[list[float]]
    #: By step, the number of times it has run.
    done: list[int]
    #: By rank, the end of its last action.
    free: list[float]
    #: By rank, the tapes without I.
    live: list[int]
    #: By rank, the time that it may still be idle.
    may_idle: list[float]
    #: By rank, the stages of the W that can run.
    waiting: list[deque[int]]
    #: By stage, the number of tapes above which its forward would leave no room for the later stages of its rank.
    room: list[float]
    #: The times at which a rank has to look again.
    wakes: list[tuple[float, int]]
    #: The problem, and what goes first.
    problem: Problem
    priority: Priority
    #: By rank, True if its last action was a backward.
    last_backward: list[bool]
    #: By first stage of a rank, the most tapes that it may have, where that is limited.
    most: dict[int, int]
    #: The steps so far.
    skeleton: Codes

    def __init__(self, problem: Problem, priority: Priority, allowed_span: float) -> None:
        num_ranks, placement = problem.num_ranks, problem.placement
        self.problem, self.priority = problem, priority
        self.arrivals = [[] for _ in range(2 * problem.num_stages)]
        self.arrivals[0] = [0.0] * problem.num_microbatches
        self.done = [0] * (2 * problem.num_stages)
        self.free = [0.0] * num_ranks
        self.live = [0] * num_ranks
        self.last_backward = [True] * num_ranks
        self.may_idle = [allowed_span - work + TOLERANCE for work in problem.work]
        self.waiting = [deque() for _ in range(num_ranks)]
        self.skeleton = [[] for _ in range(num_ranks)]
        later = {stage: len(own) - 1 - lap for own in problem.stages_of for lap, stage in enumerate(own)}
        self.room = [problem.max_tapes - later[stage] + TOLERANCE for stage in range(placement.num_stages)]
        self.most = {}
        self.wakes = [(0.0, 0)]

    def wake(self) -> None:
        """Let the next rank start something, if it is free and has anything to start."""
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
        """Find the best step that can start now, the next input's arrival, and whether W must make room first."""
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
        """True if a stage has as many live microbatches as it may have."""
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
        """Keep a rank busy for a duration; its wait before counts as idle, unless the rank had not begun."""
        if self.skeleton[rank]:
            self.may_idle[rank] -= time - self.free[rank]
        self.free[rank] = time + duration
        heappush(self.wakes, (self.free[rank], rank))
