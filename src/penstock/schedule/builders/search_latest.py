"""How late every action of a skeleton may start: the way back from the end, as `weave` is the way there."""

from __future__ import annotations

from itertools import accumulate
from math import floor, inf

from penstock.schedule.builders.search_problem import TOLERANCE, Codes, Problem


def latest_starts(problem: Problem, skeleton: Codes) -> list[list[float]] | None:
    """For each rank and step the latest start with which all ranks can still end within a span of 0.

    A span of s allows s more, for each step alike. A rank's first start is taken to be the earliest there is; between
    the steps those W are given time that memory forces, and behind a step those that cannot come before it. None, if
    memory does not allow the skeleton.
    """
    forced = [_forced_weight_time(problem, rank, steps) for rank, steps in enumerate(skeleton)]
    if any(time == inf for times in forced for time in times):
        return None
    return _Backwards(problem, skeleton, forced).result()


def _forced_weight_time(problem: Problem, rank: int, steps: list[int]) -> list[float]:
    """How long a rank must run W before each step, for there to be memory; infinite if that is not enough."""
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
    """All ranks on their way back through a skeleton; a rank that needs what is not known yet is put aside."""

    def __init__(self, problem: Problem, skeleton: Codes, forced: list[list[float]]) -> None:
        self.problem, self.skeleton, self.forced = problem, skeleton, forced
        # The latest starts of each step, that of the last microbatch first.
        self.starts: list[list[float]] = [[] for _ in range(2 * problem.num_stages)]
        self.latest = [[0.0] * len(steps) for steps in skeleton]
        self.left = [len(steps) for steps in skeleton]
        self.done = [0] * (2 * problem.num_stages)
        earliest = list(accumulate(time + hop for time, hop in zip(problem.forward, problem.hops)))
        firsts = [own[0] for own in problem.stages_of]
        # When each rank's next step has to be over, and when it must start for all that comes behind, W of the
        # backwards among them included.
        self.ends = [earliest[first - 1] if first else 0.0 for first in firsts]
        self.starts_for_rest = list(self.ends)

    def result(self) -> list[list[float]] | None:
        ready = list(range(self.problem.num_ranks))
        while ready:
            ready += self._run(ready.pop())
        return None if any(self.left) else self.latest

    def _run(self, rank: int) -> set[int]:
        """Go back as far as what follows is known, and say which other ranks may now know more."""
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
