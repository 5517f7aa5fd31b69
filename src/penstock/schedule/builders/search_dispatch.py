"""Skeletons from rules of thumb: every rank takes at any time the best of what it could start."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from penstock.schedule.builders.search_problem import TOLERANCE, Codes, Problem


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rank takes first.

    With `backward_first` an I, else an F if the last was an I and the other way round. Among several the one of the
    oldest microbatch with `oldest_first`, else the one whose stage is deepest in the model.
    """

    backward_first: bool
    oldest_first: bool


RULES = tuple(Rule(backward_first, oldest_first) for backward_first in (True, False) for oldest_first in (False, True))


def dispatch(problem: Problem, rule: Rule, allowed_span: float, num_live: Sequence[int] | None = None) -> Codes:
    """The skeleton that comes of running all ranks by a rule, W where a rank would wait (as in `weave`).

    With `num_live` the first stage of a rank has no more microbatches live than that.

    No rank gets stuck: a forward leaves room for the tapes of the rank's later stages. So the microbatch that has come
    farthest always finds room for its next forward: each tape on that rank is of an earlier stage, and the last of them
    to be made left room for this one.
    """
    dispatching = _Dispatching(problem, rule, allowed_span)
    if num_live is not None:
        dispatching.most.update((stages[0], most) for stages, most in zip(problem.stages_of, num_live))
    while dispatching.wakes:
        dispatching.wake()
    return dispatching.skeleton


class _Dispatching:
    """All ranks at one time, which goes from each moment at which a rank can start something to the next."""

    def __init__(self, problem: Problem, rule: Rule, allowed_span: float) -> None:
        num_ranks, placement = problem.num_ranks, problem.placement
        self.problem, self.rule = problem, rule
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
        forward_turn = self.last_backward[rank] and not self.rule.backward_first
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
                key = forward != forward_turn, number if self.rule.oldest_first else -stage
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
