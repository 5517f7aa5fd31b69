"""Who did what when, simulated or measured, and what follows from it: span, bubble, idle time, live microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule.actions import COMPUTE, Action, Op, Step, parts


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a rank with its start and end."""

    action: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each rank did when, simulated or measured.

    `events` holds per rank, in order, its compute, reductions and optimizer step; transfers do not appear. `makespan`
    runs from 0 to the last end. `span_cost` is the largest over ranks of the time from a rank's own first start to its
    own end, `bubble_rate` the share of it by which it exceeds the bare compute. `idle` is per rank the part of the
    makespan in which it computes nothing. In `peak_live_microbatches` a tape, from the start of its forward to the end
    of its last backward action, counts 1 / stages_per_rank.

    Source: span and bubble as in Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 5.
    """

    events: tuple[tuple[Event, ...], ...]
    makespan: float
    span_cost: float
    bubble_rate: float
    peak_live_microbatches: tuple[float, ...]
    idle: tuple[float, ...]
    title: str = ""

    @classmethod
    def from_events(
        cls,
        events: Sequence[Sequence[Event]],
        *,
        stages_per_rank: int = 1,
        compute: float | None = None,
        title: str = "",
    ) -> Timeline:
        """The timeline of events counted from a common 0.

        `compute` is the time a rank would take without waiting; left out, it is that of the busiest rank.
        """
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
            peak_live_microbatches=tuple(_peak_live(rank) / stages_per_rank for rank in events),
            idle=tuple(makespan - own - step for own, step in zip(busy, steps)),
            title=title,
        )


def _op(step: Step) -> Op | None:
    return step.op if isinstance(step, Action) else None


def _computes(step: Step) -> bool:
    return not isinstance(step, Action) or step.op in COMPUTE


def _peak_live(events: Sequence[Event]) -> int:
    """The most tapes there are at once, in a rank's events in order."""
    closing = {Op.B, Op.W}
    if not any(action.op in closing for event in events for action in parts(event.action)):
        closing = {Op.F}
    live = peak = 0
    for event in events:
        for action in parts(event.action):
            if action.op is Op.F:
                live += 1
                peak = max(peak, live)
            if action.op in closing:
                live -= 1
    return peak
