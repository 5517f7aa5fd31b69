"""What the search is asked for: stages, their times and the memory, in the numbers that its inner loops work with.

Within the search an action is a whole number. A *skeleton* holds each rank's order of forwards (2 * stage) and input
backwards (2 * stage + 1), W left out; an *order* holds all three (3 * stage + 0, 1, 2 for F, I, W). Microbatches are
left out, for every stage takes them in turn: the n-th F of a stage is that of microbatch n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import floor, isfinite
from typing import NamedTuple, TypeAlias

from penstock.schedule.actions import Action, Op, Placement, PlacementKind, Schedule, check_count
from penstock.schedule.costs import PerStage, check_stages

Codes: TypeAlias = list[list[int]]
"""One list of numbers a rank: a skeleton, or the orders."""

Maker: TypeAlias = Callable[["Problem"], Codes]
"""What makes a skeleton for any number of microbatches."""

# Sums of times and shares of memory that differ by less are the same.
TOLERANCE = 1e-9

_OPS = (Op.F, Op.I, Op.W)
_TAPES = (1, 0, -1)


class Following(NamedTuple):
    """The next step on a microbatch's way, the time of a message to it, and its rank."""

    step: int
    hop: float
    rank: int


@dataclass(frozen=True)
class Problem:
    """A pipeline for which an order is wanted.

    The times are per stage of the model, of one microbatch; `transfer` is that of a message between two ranks, which
    keeps neither busy. At most `max_live_microbatches` may be live on a rank: a tape counts 1 / stages_per_rank from
    the start of its F to the end of its I, and `weight_memory_share` of that from then to the end of its W.

    Raises: ValueError for a placement with two routes, for times, shares and counts that are not possible, and for a
    limit below 1, with which no microbatch could pass.
    """

    placement: Placement
    num_microbatches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float
    max_live_microbatches: float
    weight_memory_share: float

    def __post_init__(self) -> None:
        check_count("microbatches", self.num_microbatches)
        if self.placement.kind is PlacementKind.BIDIRECTIONAL:
            raise ValueError("the search places stages in a loop or a v, not bidirectional")
        for name in ("forward", "backward_input", "backward_weight"):
            for time in getattr(self, name):
                _check_time(name, time)
        _check_time("transfer", self.transfer)
        if not 0 <= self.weight_memory_share <= 1:
            raise ValueError(f"weight_memory_share must be between 0 and 1, got {self.weight_memory_share!r}")
        if not self.max_live_microbatches >= 1:
            raise ValueError(
                f"max_live_microbatches must be at least 1, got {self.max_live_microbatches!r}: between its forwards "
                f"and its backwards one microbatch is live in all stages of a rank"
            )

    def with_microbatches(self, num_microbatches: int) -> Problem:
        return replace(self, num_microbatches=num_microbatches)

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
        """The time of a message between a stage and the next, none behind the last stage or within a rank."""
        ranks = self.rank_of
        return (*(self.transfer if here != there else 0.0 for here, there in pairwise(ranks)), 0.0)

    @cached_property
    def following(self) -> tuple[Following | None, ...]:
        """For each step of a skeleton what comes next on a microbatch's way; nothing behind the first stage's I."""
        hops, ranks, last = self.hops, self.rank_of, 2 * self.num_stages - 2
        found: list[Following | None] = []
        for stage in range(self.num_stages):
            step = 2 * stage
            onwards = Following(step + 1, 0.0, ranks[stage])
            found.append(onwards if step == last else Following(step + 2, hops[stage], ranks[stage + 1]))
            found.append(Following(step - 1, hops[stage - 1], ranks[stage - 1]) if stage else None)
        return tuple(found)

    @cached_property
    def source_rank(self) -> tuple[int | None, ...]:
        """For each step of a skeleton the rank of what comes before it on a microbatch's way."""
        ranks: list[int | None] = [None] * (2 * self.num_stages)
        for step, following in enumerate(self.following):
            if following is not None:
                ranks[following.step] = self.rank_of[step >> 1]
        return tuple(ranks)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        each = [sum(times) for times in zip(self.forward, self.backward_input, self.backward_weight)]
        return tuple(self.num_microbatches * sum(each[stage] for stage in stages) for stages in self.stages_of)

    @cached_property
    def mean_action(self) -> float:
        """The mean time of an action."""
        return sum(self.work) / self.num_actions

    @cached_property
    def num_actions(self) -> int:
        return 3 * self.num_microbatches * self.num_stages

    @cached_property
    def max_tapes(self) -> float:
        """How many tapes with no I behind them a rank may have, not always a whole number."""
        return self.max_live_microbatches * self.placement.stages_per_rank

    @cached_property
    def max_whole_tapes(self) -> int:
        return floor(min(self.max_tapes, self.num_microbatches * self.placement.stages_per_rank) + TOLERANCE)

    def schedule(self, name: str, orders: Codes) -> Schedule:
        """The schedule that orders stand for, with the peaks of live tapes as its bounds."""
        decoded, peaks = [], []
        for codes in orders:
            counts = [0] * (3 * self.num_stages)
            actions, live, peak = [], 0, 0
            for code in codes:
                stage, op = divmod(code, 3)
                actions.append(Action(_OPS[op], stage, counts[code]))
                counts[code] += 1
                live += _TAPES[op]
                peak = max(peak, live)
            decoded.append(tuple(actions))
            peaks.append(peak)
        return Schedule(name, self.placement, self.num_microbatches, tuple(decoded), tuple(peaks))


def per_stage(name: str, value: PerStage, placement: Placement, what: str = "time") -> tuple[float, ...]:
    """What belongs to each stage: as given, or a rank's divided evenly among its stages.

    Raises: ValueError for a list with other than one number a stage; the message calls it `what`.
    """
    if not isinstance(value, Sequence):
        return (value / placement.stages_per_rank,) * placement.num_stages
    check_stages(name, value, placement, what)
    return tuple(value)


def _check_time(name: str, time: float) -> None:
    if not isfinite(time) or time < 0:
        raise ValueError(f"{name} must be a time of at least 0, got {time!r}")
