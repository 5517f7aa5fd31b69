"""Skeletons: orders of forwards and input backwards, from closed forms, repeated patterns and heuristics.

Closed forms are one forward, one backward after any warm-up, and the V without bubble. By a heuristic every rank takes
the best of the steps it could start (`dispatch`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import floor, inf
from typing import NamedTuple

from penstock.schedule.actions import Action, Op
from penstock.schedule.placement import Placement
from penstock.schedule.search.problem import TOLERANCE, Codes, PartialRun, Problem

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
    """The order without bubble of two stages a rank in a V, at 2p tapes, if all actions take equal times."""
    most = max(problem.num_microbatches, 2 * problem.num_ranks - 1)
    skeleton = []
    for rank in range(problem.num_ranks):
        order = without_bubble(problem.placement, rank, most, problem.num_microbatches)
        skeleton.append([2 * action.stage + (action.op is Op.I) for action in order])
    return skeleton


def without_bubble(
    placement: Placement, rank: int, num_microbatches: int, num_first: int | None = None
) -> tuple[Action, ...]:
    """A rank's order of two stages in a V for at least 2p-1 microbatches, with which no rank waits once it has started.

    num_first: reduces it to that many first microbatches, and leaves out W.

    Source: ZB-V, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6.
    """
    num_ranks = placement.num_ranks
    stages = placement.stages_of(rank)
    counts: Counter[tuple[Op, int]] = Counter()
    order: list[Action] = []

    def run(words: str, times: int = 1) -> None:
        """Add an action for each word: an op, and 1 or 2 for the stage; it takes the next microbatch of that pass."""
        keys = [(Op[op], stages[int(which) - 1]) for op, which in words.split()]
        for key in keys * times:
            if num_first is None or (counts[key] < num_first and key[0] is not Op.W):
                order.append(Action(*key, counts[key]))
            counts[key] += 1

    to_middle = num_ranks - rank
    run("F1", 2 * to_middle - 1)
    run("F2 F1", rank)
    run("F2 I2 W2", to_middle)
    run("F1 I1 W1 F2 I2 W2", num_microbatches - num_ranks - to_middle + 1)
    run("I1 W1 F2 I2 W2", to_middle - 1)
    run("I1 I2", rank)
    run("I1 W1", to_middle)
    run("W2", rank)
    run("W1", rank)
    return tuple(order)


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
    inputs, weights, share = problem.backward_input, problem.backward_weight, problem.weight_memory_share
    tapes = max(
        sum(starts[1][stage] + inputs[stage] - starts[0][stage] + share * weights[stage] for stage in stages) / period
        for stages in problem.stages_of
    )
    return Pattern(period, time, tapes, tuple(starts[0]), tuple(starts[1]))


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


PRIORITIES = tuple(Priority(*flags) for flags in product((True, False), (False, True)))


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
    dispatching.most.update((stages[0], most) for stages, most in zip(problem.stages_of, num_live or ()))
    while dispatching.wakes:
        dispatching.wake()
    return dispatching.skeleton


class _Dispatching(PartialRun):
    """All ranks in a run that goes from each moment at which a rank can start something to the next."""

    #: The rule of what goes first.
    priority: Priority
    #: By rank, the time that it may still be idle, and True if its last action was a backward.
    may_idle: list[float]
    last_backward: list[bool]
    #: By stage, the number of tapes above which its forward would leave no room for the later stages of its rank.
    room: list[float]
    #: The times at which a rank has to look again.
    wakes: list[tuple[float, int]]
    #: By first stage of a rank, the most tapes that it may have, where that is limited.
    most: dict[int, int]
    #: The steps so far.
    skeleton: Codes

    def __init__(self, problem: Problem, priority: Priority, allowed_span: float) -> None:
        super().__init__(problem)
        self.priority = priority
        self.last_backward = [True] * problem.num_ranks
        self.may_idle = [allowed_span - work + TOLERANCE for work in problem.work]
        self.skeleton = [[] for _ in range(problem.num_ranks)]
        later = {stage: len(stages) - 1 - lap for stages in problem.stages_of for lap, stage in enumerate(stages)}
        self.room = [problem.max_tapes - later[stage] + TOLERANCE for stage in range(problem.num_stages)]
        self.most = {}
        self.wakes = [(0.0, 0)]

    def wake(self) -> None:
        """Let the next rank start something, if it is free and has anything to start."""
        time, rank = heappop(self.wakes)
        if time < self.now[rank] - TOLERANCE:
            return  # busy; it looks again when it is free
        step, next_arrival, needs_memory = self._choose(rank, time)
        waiting, start = self.waiting[rank], max(time, self.now[rank])
        if step is not None and not needs_memory:
            self._run(rank, step, start)
        elif waiting:
            gap, weight = next_arrival - time, self.problem.backward_weight[waiting[0]]
            waited = time - self.now[rank]
            if needs_memory or gap >= weight - TOLERANCE or waited + gap > self.may_idle[rank]:
                self._occupy(rank, start, weight)
                waiting.popleft()

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
                if forward and (
                    tapes > self.room[stage]
                    or (stage in self.most and number - self.done[2 * stage + 1] >= self.most[stage])
                ):
                    continue
                if arrivals[number] > time + TOLERANCE:
                    next_arrival = min(next_arrival, arrivals[number])
                    continue
                key = forward != forward_turn, number if self.priority.oldest_first else -stage
                if best is None or key < best[0]:
                    best = key, step, forward and tapes + weights > self.room[stage]
        return (None, next_arrival, False) if best is None else (best[1], next_arrival, best[2])

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
            self.may_idle[rank] -= time - self.now[rank]
        self.now[rank] = time + duration
        heappush(self.wakes, (self.now[rank], rank))
