"""Who did what when, simulated or measured, and what follows from it: span, bubble, idle time, live microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.schedule.actions import COMPUTE, Action, Op, Step, parts


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a rank with its start and end."""

    action: Step
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What a live tape weighs.

    A microbatch counts 1 from its F to its I, and `weight_share` of that from then until its W. `microbatch_bytes` is
    what one microbatch keeps on a rank, in all the stages that it goes through there; where microbatches differ in
    length, `lengths` has a factor for each on its bytes.

    Source: the share is M_W / M_B of Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
    """

    weight_share: float = 1.0
    microbatch_bytes: float = 0.0
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """What each rank did when, simulated or measured.

    `events` holds per rank, in order, its compute, reductions and optimizer step; transfers do not appear. `makespan`
    runs from 0 to the last end. `span_cost` is the largest over ranks of the time from a rank's own first start to its
    own end, `bubble_rate` the share of it by which it exceeds the bare compute. `idle` is per rank the part of the
    makespan in which it computes nothing. In `peak_live_microbatches` a tape, from the start of its forward to the end
    of its last backward action, counts 1 / `stages_per_rank`: the number of stages that a microbatch has on a rank.

    Source: span and bubble as in Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 5.
    """

    events: tuple[tuple[Event, ...], ...]
    makespan: float
    span_cost: float
    bubble_rate: float
    peak_live_microbatches: tuple[float, ...]
    idle: tuple[float, ...]
    title: str = ""
    stages_per_rank: int = 1
    memory: Memory = Memory()

    @classmethod
    def from_events(
        cls,
        events: Sequence[Sequence[Event]],
        *,
        stages_per_rank: int = 1,
        compute: float | None = None,
        title: str = "",
        memory: Memory | None = None,
    ) -> Timeline:
        """The timeline of events counted from a common 0.

        `compute` is the time a rank would take without waiting; left out, it is that of the busiest rank.
        """
        memory = memory or Memory()
        makespan = max((event.end for rank in events for event in rank), default=0.0)
        span_cost = max((max(event.end for event in rank) - rank[0].start for rank in events if rank), default=0.0)
        busy = [sum(event.end - event.start for event in rank if _computes(event.action)) for rank in events]
        if compute is None:
            compute = max(busy, default=0.0)
        steps = [sum(event.end - event.start for event in rank if _op(event.action) is Op.STEP) for rank in events]
        return cls(
            events=tuple(map(tuple, events)),
            makespan=makespan,
            span_cost=span_cost,
            bubble_rate=(span_cost - compute) / span_cost if span_cost else 0.0,
            peak_live_microbatches=tuple(_peak_live(rank, memory.weight_share) / stages_per_rank for rank in events),
            idle=tuple(makespan - own - step for own, step in zip(busy, steps)),
            title=title,
            stages_per_rank=stages_per_rank,
            memory=memory,
        )

    def live_microbatches(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The live microbatches of a rank over time: each time at which they change, and how many there are then."""
        return self._live(rank, 1 / self.stages_per_rank)

    def live_bytes(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The bytes of a rank's live tapes over time: each time at which they change, and how many there are then."""
        return self._live(rank, self.memory.microbatch_bytes / self.stages_per_rank, self.memory.lengths)

    @property
    def peak_live_bytes(self) -> tuple[float, ...]:
        """The most bytes of live tapes on each rank."""
        ranks = range(len(self.events))
        return tuple(max((live for _, live in self.live_bytes(rank)), default=0.0) for rank in ranks)

    def _live(self, rank: int, per_tape: float, lengths: Sequence[float] = ()) -> tuple[tuple[float, float], ...]:
        share = self.memory.weight_share
        changes: dict[float, float] = {}
        for time, microbatch, full, reduced in _changes(self.events[rank]):
            change = (full + share * reduced) * (lengths[microbatch] if lengths else 1)
            changes[time] = changes.get(time, 0) + change
        return tuple((time, live * per_tape) for time, live in zip(changes, accumulate(changes.values())))


def _op(step: Step) -> Op | None:
    return step.op if isinstance(step, Action) else None


def _computes(step: Step) -> bool:
    return not isinstance(step, Action) or step.op in COMPUTE


def _changes(events: Sequence[Event]) -> Iterator[tuple[float, int, int, int]]:
    """When a rank's live tapes change: time, microbatch, and how many more are there in full, and for their W alone."""
    training = any(action.op in (Op.B, Op.W) for event in events for action in parts(event.action))
    for event in events:
        actions = parts(event.action)
        for action in actions:
            if action.op is Op.F:
                yield event.start, action.microbatch, 1, 0
        for action in actions:
            if action.op is Op.B or (action.op is Op.F and not training):
                yield event.end, action.microbatch, -1, 0
            elif action.op is Op.I:
                yield event.end, action.microbatch, -1, 1
            elif action.op is Op.W:
                yield event.end, action.microbatch, 0, -1


def _peak_live(events: Sequence[Event], weight_share: float) -> float:
    """The most tapes there are at once, in a rank's events in order."""
    full = reduced = 0
    peak = 0.0
    for _, _, more_full, more_reduced in _changes(events):
        full += more_full
        reduced += more_reduced
        peak = max(peak, full + weight_share * reduced)
    return peak
