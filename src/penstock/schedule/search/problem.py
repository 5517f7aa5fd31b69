"""The search problem, in the numbers that inner loops work with, and lower bounds that no order can beat.

Within the search an action is a whole number. A *skeleton* holds each rank's order of forwards (2 * stage) and input
backwards (2 * stage + 1), without W; an *order* holds all three (3 * stage + 0, 1, 2 for F, I, W). Microbatches are
left out, because every stage takes them in turn: the n-th F of a stage is that of microbatch n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import floor, inf
from typing import NamedTuple, TypeAlias

from penstock.schedule.actions import Action, Op, Schedule, peak_tapes
from penstock.schedule.costs import Costs, Durations, per_stage
from penstock.schedule.placement import Placement, PlacementKind, check_count

Codes: TypeAlias = list[list[int]]
"""One list of numbers a rank: a skeleton, or orders."""

Maker: TypeAlias = Callable[["Problem"], Codes]
"""Makes a skeleton for any number of microbatches."""

# Sums of times and shares of memory count as equal if they differ by less.
TOLERANCE = 1e-9

_OPS = (Op.F, Op.I, Op.W)


class Following(NamedTuple):
    """The next step on a microbatch's way."""

    step: int
    #: The time of a message to it.
    hop: float
    #: Its rank.
    rank: int


@dataclass(frozen=True)
class Problem:
    """A pipeline whose order is searched for.

    Raises: ValueError for a placement with two routes, for impossible shares and counts, and for a limit below 1, with
    which no microbatch could pass.
    """

    placement: Placement
    num_microbatches: int
    #: The times of one microbatch, one for each stage of the model.
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    #: The time of a message between two ranks, which keeps neither busy.
    transfer: float
    #: The most that may be live on a rank. A tape counts 1 / stages_per_rank from the start of its F to its I's end.
    max_live_microbatches: float
    #: The share of that which a tape counts from then to the end of its W.
    weight_memory_share: float

    def __post_init__(self) -> None:
        check_count("microbatches", self.num_microbatches)
        if self.placement.kind is PlacementKind.BIDIRECTIONAL:
            raise ValueError("the search places stages in a loop or a v, not bidirectional")
        if not 0 <= self.weight_memory_share <= 1:
            raise ValueError(f"weight_memory_share must be between 0 and 1, got {self.weight_memory_share!r}")
        if not self.max_live_microbatches >= 1:
            raise ValueError(
                f"max_live_microbatches must be at least 1, got {self.max_live_microbatches!r}: between its forwards "
                f"and its backwards one microbatch is live in all stages of a rank"
            )

    @classmethod
    def of(
        cls, placement: Placement, microbatches: int, costs: Costs, limit: float, link: Callable[..., float] = min
    ) -> Problem:
        """Make the problem with these costs, all microbatches as long as the first; `link` chooses one of the links."""
        length = costs.lengths[0] if costs.lengths else 1.0
        latency, sending = (link(one) if isinstance(one, Sequence) else one for one in (costs.transfer, costs.sending))
        share = costs.weight_memory_share
        forward, backward_input, backward_weight = (
            tuple(length * time for time in per_stage(name, getattr(costs, name), placement))
            for name in ("forward", "backward_input", "backward_weight")
        )
        # A stage that keeps less has more freedom, so the least share keeps a bound valid.
        share = min(1.0, *share) if isinstance(share, Sequence) else share
        transfer = latency + length * sending
        return cls(placement, microbatches, forward, backward_input, backward_weight, transfer, limit, share)

    @cached_property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @cached_property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        return tuple(map(self.placement.rank_of, range(self.num_stages)))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self.placement.stages_of, range(self.num_ranks)))

    @cached_property
    def hops(self) -> tuple[float, ...]:
        """The time of a message from each stage to the next; 0 after the last stage and within a rank."""
        ranks = self.rank_of
        return (*(self.transfer if here != there else 0.0 for here, there in pairwise(ranks)), 0.0)

    @cached_property
    def following(self) -> tuple[Following | None, ...]:
        """By step of a skeleton, the next one on a microbatch's way; None after the first stage's I."""
        hops, ranks, last = self.hops, self.rank_of, 2 * self.num_stages - 2
        found: list[Following | None] = []
        for stage in range(self.num_stages):
            step = 2 * stage
            onwards = Following(step + 1, 0.0, ranks[stage])
            found.append(onwards if step == last else Following(step + 2, hops[stage], ranks[stage + 1]))
            found.append(Following(step - 1, hops[stage - 1], ranks[stage - 1]) if stage else None)
        return tuple(found)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The compute time of each rank."""
        each = [sum(times) for times in zip(self.forward, self.backward_input, self.backward_weight)]
        return tuple(self.num_microbatches * sum(each[stage] for stage in stages) for stages in self.stages_of)

    @cached_property
    def mean_action(self) -> float:
        return sum(self.work) / self.num_actions

    @cached_property
    def num_actions(self) -> int:
        return 3 * self.num_microbatches * self.num_stages

    @cached_property
    def max_tapes(self) -> float:
        """The most tapes without I that a rank may have; not necessarily a whole number."""
        return self.max_live_microbatches * self.placement.stages_per_rank

    @cached_property
    def max_whole_tapes(self) -> int:
        return floor(min(self.max_tapes, self.num_microbatches * self.placement.stages_per_rank) + TOLERANCE)

    def schedule(self, name: str, orders: Codes) -> Schedule:
        """Turn orders into a schedule, with the peaks of live tapes as its bounds."""
        decoded = []
        for codes in orders:
            counts, actions = [0] * (3 * self.num_stages), []
            for code in codes:
                stage, op = divmod(code, 3)
                actions.append(Action(_OPS[op], stage, counts[code]))
                counts[code] += 1
            decoded.append(tuple(actions))
        return Schedule(
            name, self.placement, self.num_microbatches, tuple(decoded), live_bound=tuple(map(peak_tapes, decoded))
        )


class PartialRun:
    """All ranks of a problem, part of the way through their actions."""

    #: The problem; by step, the arrivals of its inputs so far, and the number of times it has run.
    problem: Problem
    arrivals: list[list[float]]
    done: list[int]
    #: By rank, the end of its last action, its tapes without I, and the stages of the W that can run.
    now: list[float]
    live: list[int]
    waiting: list[deque[int]]

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.arrivals = [[] for _ in range(2 * problem.num_stages)]
        self.arrivals[0] = [0.0] * problem.num_microbatches
        self.done = [0] * (2 * problem.num_stages)
        self.now, self.live = [0.0] * problem.num_ranks, [0] * problem.num_ranks
        self.waiting = [deque() for _ in range(problem.num_ranks)]


def bound(placement: Placement, microbatches: int, costs: Costs, limit: float = inf) -> float:
    """Compute a lower bound on the span of every order with at most `limit` live microbatches on a rank.

    The span is the longest time over ranks from a rank's own first start to its own end; a microbatch counts 1 from its
    F to its I and `costs.weight_memory_share` from then to its W. The bound is the largest of these:

    * *Work.* A rank computes for as long as its actions take.
    * *Idle.* Between a rank's first start and its first I, a microbatch goes to the last stage and back. In that time
      the rank can run only as many F as it has memory for. Another such round trip lies between its last F and the I of
      that microbatch. In that time the rank can run only the rest of the live microbatches, and the remaining W; the
      most of each that memory allows is a knapsack, solved by trying all numbers. Both waits add to the rank's work if
      the last F comes after the first I, which memory enforces for more microbatches than fit in it; for fewer, only
      the longer wait does. For 1F1B's memory and equal stages this is exactly the span of ZB-H1.
    * *Window.* All F and I of a stage lie between the arrival of its first input and the departure of its last
      gradient. Before that window lies the way down from any earlier rank's first stage, after it the way back up and a
      W there. Within it, beside F and I, lie the W that memory forces (those that cannot all wait until the last I),
      and the rank's idle time from above.
    * *Rounds.* With memory for k tapes of a stage, the F of microbatch j + k waits for the I of microbatch j.
    * *Area.* Each tape lives at least for its way to the last stage and back, and for its share until its W has run.
      The sum of these times fits in the memory times the span, less the part that cannot be used: tapes appear one F
      apart, and disappear one I and W, or one W, apart.

    If microbatches differ in length, or the placement is bidirectional, the bound is the work alone.

    >>> from penstock.schedule import PlacementKind
    >>> bound(Placement(PlacementKind.LOOP, num_ranks=4), microbatches=8, costs=Costs(), limit=4)
    27.0

    Raises: ValueError for what `Problem` refuses, and if fused pairs have a time of their own.
    """
    if costs.pair is not None:
        raise ValueError("there is no bound if fused pairs have a time of their own")
    if len(set(costs.lengths)) > 1 or placement.kind is PlacementKind.BIDIRECTIONAL:
        return _work(placement, microbatches, costs)
    return lower_bound(Problem.of(placement, microbatches, costs, limit))


def _work(placement: Placement, num_microbatches: int, costs: Costs) -> float:
    """The compute time of the busiest rank."""
    schedule = Schedule("", placement, num_microbatches, ((),) * placement.num_ranks)
    durations = Durations(costs, schedule)
    return max(
        sum(
            durations.of(Action(op, stage, microbatch))
            for stage in placement.stages_of(rank)
            for microbatch in schedule.microbatches_of(stage)
            for op in (Op.F, Op.B)
        )
        for rank in range(placement.num_ranks)
    )


def lower_bound(problem: Problem) -> float:
    """Compute the bound of `bound` for a problem."""
    ways = _Ways(problem)
    idle = [_idle(problem, ways, rank) for rank in range(problem.num_ranks)]
    return max(
        max(work + wait for work, wait in zip(problem.work, idle)),
        max(_windows(problem, ways, idle)),
        max(_rounds(problem, ways, rank) for rank in range(problem.num_ranks)),
        max(_area(problem, ways, rank) for rank in range(problem.num_ranks)),
    )


class _Ways:
    """The least times of a microbatch between stages, if it never waits."""

    #: By stage, the time after which its link has been passed.
    _hops: Sequence[float]
    #: From the start of the first stage's F to that of each other's; for I from each stage's to the first's.
    _down: list[float]
    _up: list[float]

    def __init__(self, problem: Problem) -> None:
        self._hops = hops = problem.hops
        down = accumulate((time + hop for time, hop in zip(problem.forward, hops)), initial=0.0)
        up = accumulate((time + hop for time, hop in zip(problem.backward_input, hops)), initial=0.0)
        self._down, self._up = list(down), list(up)

    def down(self, stage: int, later: int) -> float:
        """From the start of F of one stage to the start of F of a later one."""
        return self._down[later] - self._down[stage]

    def up(self, stage: int, later: int) -> float:
        """From the end of I of a later stage to the end of I of an earlier one, less its own message."""
        return self._up[later] - self._up[stage]

    def back(self, stage: int) -> float:
        """From the start of a stage's F to the start of its I."""
        return self._down[-1] - self._down[stage] + self._up[-1] - self._up[stage + 1] + self._hops[stage]


def _idle(problem: Problem, ways: _Ways, rank: int) -> float:
    """The least time that a rank waits, before its first I and between its last F and that microbatch's I."""
    stages, num_microbatches = problem.stages_of[rank], problem.num_microbatches
    first, last = stages[0], stages[-1]
    num_tapes, runnable = problem.max_whole_tapes, 0.0
    for time in sorted((problem.forward[stage] for stage in stages), reverse=True):
        runnable += min(num_tapes, num_microbatches) * time
        num_tapes = max(0, num_tapes - num_microbatches)
    warm_up = max(0.0, ways.down(first, last) + ways.back(last) - runnable)
    drain = max(0.0, ways.back(first) - _runnable_in_drain(problem, rank))
    # The last F comes after the first I if not all microbatches fit before it, the first one with all its tapes.
    apart = num_microbatches > problem.max_whole_tapes - (len(stages) - 1)
    return warm_up + drain if apart else max(warm_up, drain)


def _runnable_in_drain(problem: Problem, rank: int) -> float:
    """The most work that a rank can do between the start of its first stage's last F and that microbatch's I there."""
    forward, inputs, weights = problem.forward, problem.backward_input, problem.backward_weight
    first, *later = problem.stages_of[rank]
    others, most = problem.num_microbatches - 1, 0.0
    behind_first = sum(forward[stage] + inputs[stage] + weights[stage] for stage in later)
    whole = behind_first + inputs[first] + weights[first]
    weight = max(weights[stage] for stage in problem.stages_of[rank])
    for num_live in range(min(others, problem.max_whole_tapes - 1) + 1):
        num_waiting = min(_num_waiting(problem, num_live + 1), (1 + len(later)) * others - num_live)
        most = max(most, num_live * whole + num_waiting * weight)
    return forward[first] + behind_first + most


def _num_waiting(problem: Problem, num_live: int) -> int:
    """The most tapes with only a W left that fit in memory beside live ones."""
    num_tapes = problem.num_microbatches * problem.placement.stages_per_rank
    free = problem.max_tapes - num_live + TOLERANCE
    if free >= num_tapes * problem.weight_memory_share:
        return num_tapes
    return max(0, floor(free / problem.weight_memory_share))


def _windows(problem: Problem, ways: _Ways, idle: list[float]) -> Iterator[float]:
    """The spans of the windows of every stage, seen from every rank's first stage before it."""
    starts = [stages[0] for stages in problem.stages_of]
    for stage in range(problem.num_stages):
        rank = problem.rank_of[stage]
        inside = [other for other in problem.stages_of[rank] if other >= stage]
        times = sum(problem.forward[other] + problem.backward_input[other] for other in inside)
        num_forced = len(inside) * problem.num_microbatches - 1 - _num_waiting(problem, 1)
        window = problem.num_microbatches * times
        window += max(0, num_forced) * min(problem.backward_weight[other] for other in inside)
        if stage == starts[rank]:
            window += idle[rank]
        for start in starts:
            if start <= stage:
                yield ways.down(start, stage) + window + ways.up(start, stage) + problem.backward_weight[start]


def _rounds(problem: Problem, ways: _Ways, rank: int) -> float:
    """The span if a rank has as many microbatches in progress as memory allows, none of which ever waits."""
    first, num_tapes = problem.stages_of[rank][0], problem.max_whole_tapes
    way = ways.back(first) + problem.backward_input[first]
    weight = problem.backward_weight[first]
    # With memory for one tape and less than a W beside it, the W too comes before the next F.
    forced = weight if num_tapes == 1 and _num_waiting(problem, 1) == 0 else 0.0
    num_rounds, left = divmod(problem.num_microbatches - 1, num_tapes)
    return num_rounds * (way + forced) + left * problem.forward[first] + way + weight


def _area(problem: Problem, ways: _Ways, rank: int) -> float:
    """The span in which the lives of all tapes of a rank fit in its memory."""
    share, max_tapes, stages = problem.weight_memory_share, problem.max_tapes, problem.stages_of[rank]
    inputs, weights = problem.backward_input, problem.backward_weight
    if max_tapes == inf:
        return 0.0
    lives = (ways.back(stage) + inputs[stage] + share * weights[stage] for stage in stages)
    area = problem.num_microbatches * sum(lives)
    # Memory fills up one F at a time, and empties one I and W, or one W, at a time.
    forward, num_tapes = min(problem.forward[stage] for stage in stages), problem.max_whole_tapes
    whole, weight = min(inputs[stage] + weights[stage] for stage in stages), min(weights[stage] for stage in stages)
    if whole <= 0 or weight <= 0:
        return area / max_tapes
    emptied = max(1 / whole, share / weight)
    filling, emptying = num_tapes * forward, (max_tapes - 1) / emptied
    if area / max_tapes < filling + emptying:
        return area / max_tapes  # the two would overlap
    unused = forward * sum(max_tapes - number for number in range(1, num_tapes)) + emptying * (max_tapes - 1) / 2
    return (area + unused) / max_tapes
