"""Weaving: place the W between the forwards and input backwards of a skeleton, which makes it an order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, dropwhile
from math import floor, inf

from penstock.schedule.search.problem import TOLERANCE, Codes, Problem


def weave(
    problem: Problem, skeleton: Codes, allowed_span: float | None, latest: Sequence[Sequence[float]] | None = None
) -> tuple[float, Codes] | None:
    """Place each rank's W between the forwards and input backwards of a skeleton; None if memory does not allow it.

    Returns the span, the longest time over ranks from a rank's own first start to its own end, and the orders.

    A W goes where it costs nothing: into a wait at least as long as the W. If memory is full, W go before the next
    forward. In a wait shorter than a W the rank stays idle while it can still end within `allowed_span`; after that it
    takes a W, and the next step is late. With `latest`, the starts that a span of 0 would need, it takes a W even
    earlier if that makes no end late. Backwards that no other rank waits for are late whenever a W fits. The remaining
    W come at the end.

    So `allowed_span` is a goal, not a limit: a small one keeps every rank busy at the expense of those that wait for
    it. Without one, no rank waits longer in total than another has before; the ranks then take turns, forwards from the
    first to the last and one backward each on the way back.

    Source: without `allowed_span` and `latest` this is the rule of Zero Bubble Pipeline Parallelism (arXiv 2401.10241),
    section 3.1.
    """
    weaving = _Weaving(problem, skeleton, allowed_span)
    if latest is not None and allowed_span is not None:
        weaving.latest = [[start + allowed_span + TOLERANCE for start in starts] for starts in latest]
    return weaving.result()


class _Weaving:
    """All ranks in a run through a skeleton; a rank that needs an input not made yet is put aside."""

    #: By step, the arrivals of its inputs so far.
    arrivals: list[list[float]]
    #: By step, the number of times it has run.
    done: list[int]
    #: By rank, its place in the skeleton.
    place: list[int]
    #: By rank, the end of its last action.
    now: list[float]
    #: By rank, the tapes without I.
    live: list[int]
    #: By rank, the time that it has been idle, and may be; the latter None without an allowed span.
    idle: list[float]
    may_idle: list[float] | None
    #: By rank, the stages of the W that can run.
    waiting: list[deque[int]]
    #: By rank, the number of steps that others may wait for: all but the first stage's backwards at the end.
    awaited: list[int]
    #: By rank and place, the latest start.
    latest: list[list[float]] | None
    #: The problem, and the steps whose order is fixed.
    problem: Problem
    skeleton: Codes
    #: By rank, its first start.
    start: list[float | None]
    #: The orders so far, with every W.
    orders: Codes

    def __init__(self, problem: Problem, skeleton: Codes, allowed_span: float | None) -> None:
        num_ranks = problem.num_ranks
        self.problem, self.skeleton = problem, skeleton
        self.arrivals = [[] for _ in range(2 * problem.num_stages)]
        self.arrivals[0] = [0.0] * problem.num_microbatches
        self.done = [0] * (2 * problem.num_stages)
        self.place, self.now = [0] * num_ranks, [0.0] * num_ranks
        self.start = [None] * num_ranks
        self.live = [0] * num_ranks
        self.idle = [0.0] * num_ranks
        self.may_idle = None if allowed_span is None else [allowed_span - work + TOLERANCE for work in problem.work]
        self.waiting = [deque() for _ in range(num_ranks)]
        self.orders = [[] for _ in range(num_ranks)]
        # All but the backwards at the end.
        self.awaited = [len([*dropwhile((1).__eq__, reversed(steps))]) for steps in skeleton]
        self.latest = None

    def result(self) -> tuple[float, Codes] | None:
        weight = self.problem.backward_weight
        fits = self._run_in_turns() if self.may_idle is None else self._run_all()
        if not fits or any(place < len(steps) for place, steps in zip(self.place, self.skeleton)):
            return None
        for rank, stages in enumerate(self.waiting):
            self.now[rank] += sum(weight[stage] for stage in stages)
            self.orders[rank] += [3 * stage + 2 for stage in stages]
        return max(now - (start or 0.0) for now, start in zip(self.now, self.start)), self.orders

    def _run_all(self) -> bool:
        """Run every rank as far as possible, until none can continue; False if memory stays full."""
        ready = list(range(self.problem.num_ranks))
        listed = [True] * self.problem.num_ranks
        while ready:
            rank = ready.pop()
            listed[rank] = False
            reached = self._run(rank)
            if reached is None:
                return False
            for other in reached:
                if not listed[other]:
                    listed[other] = True
                    ready.append(other)
        return True

    def _run_in_turns(self) -> bool:
        """Run the ranks in turn, so that all have progressed about equally when their waits are compared."""
        ranks = range(self.problem.num_ranks)
        num_done = -1
        while num_done < (num_done := sum(self.place)):
            for rank in ranks:
                if self._run(rank, only=0) is None:
                    return False
            for rank in reversed(ranks):
                self._run(rank, only=1)
        return True

    def _run(self, rank: int, only: int | None = None) -> set[int] | None:
        """Continue as far as inputs allow; return the ranks that got an input, or None if memory stays full.

        With `only` 0 the rank stops at the next backward, with 1 after one backward.
        """
        problem, steps = self.problem, self.skeleton[rank]
        times, weight = (problem.forward, problem.backward_input), problem.backward_weight
        share, max_tapes = problem.weight_memory_share, problem.max_tapes + TOLERANCE
        waiting, order, done = self.waiting[rank], self.orders[rank], self.done
        now, live, idle, place = self.now[rank], self.live[rank], self.idle[rank], self.place[rank]
        may_idle = max(self.idle) + TOLERANCE if self.may_idle is None else self.may_idle[rank]
        awaited, latest = self.awaited[rank], None if self.latest is None else self.latest[rank]
        reached = set()
        while place < len(steps):
            step = steps[place]
            arrivals = self.arrivals[step]
            if done[step] == len(arrivals):
                break
            arrival = arrivals[done[step]]
            stage, backward = step >> 1, step & 1
            if only is not None and backward != only:
                break
            if self.start[rank] is None:
                self.start[rank] = now = arrival
            while not backward and live + 1 + share * len(waiting) > max_tapes:
                if not waiting:
                    return None
                order.append(3 * waiting[0] + 2)
                now += weight[waiting.popleft()]
            while waiting and arrival - now > TOLERANCE:
                gap, end = arrival - now, now + weight[waiting[0]]
                harms = place < awaited and end > arrival + TOLERANCE and (latest is None or end > latest[place])
                if harms and idle + gap <= may_idle:
                    break
                order.append(3 * waiting[0] + 2)
                now += weight[waiting.popleft()]
            if now < arrival:
                idle += arrival - now
                now = arrival
            now += times[backward][stage]
            order.append(3 * stage + backward)
            done[step] += 1
            place += 1
            if backward:
                live -= 1
                waiting.append(stage)
            else:
                live += 1
            if (following := problem.following[step]) is not None:
                self.arrivals[following.step].append(now + following.hop)
                if following.rank != rank:
                    reached.add(following.rank)
            if only == 1:
                break
        self.now[rank], self.live[rank], self.idle[rank], self.place[rank] = now, live, idle, place
        return reached


def latest_starts(problem: Problem, skeleton: Codes) -> list[list[float]] | None:
    """Compute, by rank and place, the latest starts with which all ranks can still end within a span of 0.

    A span of s allows s more for each step. A rank's first start is taken to be the earliest possible. Time is reserved
    for the W that memory forces between steps, and after a step for those that cannot come before it. The result is
    None if memory does not allow the skeleton.
    """
    forced = [_forced_weight_time(problem, rank, steps) for rank, steps in enumerate(skeleton)]
    if any(time == inf for times in forced for time in times):
        return None
    return _Backwards(problem, skeleton, forced).result()


def _forced_weight_time(problem: Problem, rank: int, steps: list[int]) -> list[float]:
    """The time for which a rank must run W before each step to have memory for it; infinite if no time is enough."""
    weight = min(problem.backward_weight[stage] for stage in problem.stages_of[rank])
    share = problem.weight_memory_share
    num_live = num_backward = num_forced = 0
    times = []
    for step in steps:
        num_more = 0
        if step & 1:
            num_live -= 1
            num_backward += 1
        else:
            num_live += 1
            free = problem.max_tapes - num_live + TOLERANCE
            if free < 0:
                return [inf]
            if num_backward * share > free:
                num_more = max(0, num_backward - floor(free / share) - num_forced)
        num_forced += num_more
        times.append(num_more * weight)
    return times


class _Backwards:
    """All ranks in a run backwards through a skeleton; a rank that needs a start not known yet is put aside."""

    #: The problem, and the steps whose order is fixed.
    problem: Problem
    skeleton: Codes
    #: By rank and place, the time of W that has to run before that step.
    forced: list[list[float]]
    #: By step, the latest starts, that of the last microbatch first.
    starts: list[list[float]]
    #: By rank and place, the latest start.
    latest: list[list[float]]
    #: By rank, the number of steps that come before those that are known.
    left: list[int]
    #: By step, the number of times that its start is known.
    done: list[int]
    #: By rank, the time by which its next step has to end, and by which it must start to leave time for all later
    #: steps, including the W of their backwards.
    ends: list[float]
    starts_for_rest: list[float]

    def __init__(self, problem: Problem, skeleton: Codes, forced: list[list[float]]) -> None:
        self.problem, self.skeleton, self.forced = problem, skeleton, forced
        self.starts = [[] for _ in range(2 * problem.num_stages)]
        self.latest = [[0.0] * len(steps) for steps in skeleton]
        self.left = [len(steps) for steps in skeleton]
        self.done = [0] * (2 * problem.num_stages)
        earliest = list(accumulate(time + hop for time, hop in zip(problem.forward, problem.hops)))
        firsts = [own[0] for own in problem.stages_of]
        self.ends = [earliest[first - 1] if first else 0.0 for first in firsts]
        self.starts_for_rest = list(self.ends)

    def result(self) -> list[list[float]] | None:
        ready = list(range(self.problem.num_ranks))
        while ready:
            ready += self._run(ready.pop())
        return None if any(self.left) else self.latest

    def _run(self, rank: int) -> set[int]:
        """Go back as far as the following steps are known; return the other ranks that may now know more."""
        problem, steps, reached = self.problem, self.skeleton[rank], set()
        while self.left[rank]:
            place = self.left[rank] - 1
            step = steps[place]
            end, following = self.ends[rank], problem.following[step]
            if following is not None:
                known = self.starts[following.step]
                if self.done[step] == len(known):
                    break
                end = min(end, known[self.done[step]] - following.hop)
            backward, stage = step & 1, step >> 1
            duration = (problem.backward_input if backward else problem.forward)[stage]
            self.starts_for_rest[rank] -= duration + (problem.backward_weight[stage] if backward else 0.0)
            start = min(end - duration, self.starts_for_rest[rank])
            self.done[step] += 1
            self.starts[step].append(start)
            self.latest[rank][place] = start
            self.ends[rank] = start - self.forced[rank][place]
            self.left[rank] = place
            if (source := problem.source_rank[step]) not in (None, rank):
                reached.add(source)
        return reached
