"""Who did what when, simulated or measured, and what follows from it: span, bubble, idle time, live microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    what one microbatch keeps on a rank, in all the stages that it goes through there. Both are one number, or one for
    each stage of the model, where the bytes are that stage's own. Where microbatches differ in length, `lengths` has a
    factor for each on its bytes.

    Source: the share is M_W / M_B of Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
    """

    weight_share: float | tuple[float, ...] = 1.0
    microbatch_bytes: float | tuple[float, ...] = 0.0
    lengths: tuple[float, ...] = ()

    @property
    def has_bytes(self) -> bool:
        """Whether it is known how many bytes a tape has."""
        sizes = self.microbatch_bytes
        return any(sizes) if isinstance(sizes, tuple) else sizes > 0

    def share_of(self, stage: int) -> float:
        """What is left of a stage's tape after its I."""
        shares = self.weight_share
        return shares[stage % len(shares)] if isinstance(shares, tuple) else shares

    def bytes_of(self, stage: int, stages_per_rank: int) -> float:
        """A whole tape of a stage, where a microbatch goes through so many stages of a rank."""
        sizes = self.microbatch_bytes
        return sizes[stage % len(sizes)] if isinstance(sizes, tuple) else sizes / stages_per_rank


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
            peak_live_microbatches=tuple(_peak_live(rank, memory) / stages_per_rank for rank in events),
            idle=tuple(makespan - own - step for own, step in zip(busy, steps)),
            title=title,
            stages_per_rank=stages_per_rank,
            memory=memory,
        )

    def live_microbatches(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The live microbatches of a rank over time: each time at which they change, and how many there are then."""
        return _over_time(self._live(rank, lambda stage, microbatch: 1), 1 / self.stages_per_rank)

    def live_bytes(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The bytes of a rank's live tapes over time: each time at which they change, and how many there are then."""
        # A part of a rank's bytes need be no number that adds up exactly: it is multiplied last.
        whole = self.memory.bytes_of(0, self.stages_per_rank) or 1
        return _over_time(self._live(rank, lambda *tape: self._tape_bytes(*tape) / whole), whole)

    @property
    def peak_live_bytes(self) -> tuple[float, ...]:
        """The most bytes of live tapes on each rank."""
        ranks = range(len(self.events))
        return tuple(max((live for _, live in self.live_bytes(rank)), default=0.0) for rank in ranks)

    def bytes_at_peak(self, rank: int) -> dict[int, float]:
        """The bytes that each of a rank's stages keeps when they are most in all: when an action starts or has ended.

        What an action gives back is gone before the next one keeps anything.
        """
        live: dict[int, float] = {}
        most, found = 0.0, live
        for _, stage, change in self._live(rank, self._tape_bytes):
            live[stage] = live.get(stage, 0.0) + change
            if (total := sum(live.values())) > most:
                most, found = total, dict(live)
        return found

    def _tape_bytes(self, stage: int, microbatch: int) -> float:
        lengths = self.memory.lengths
        return self.memory.bytes_of(stage, self.stages_per_rank) * (lengths[microbatch] if lengths else 1)

    def _live(self, rank: int, weigh: Callable[[int, int], float]) -> Iterator[tuple[float, int, float]]:
        """Each change of a rank's live tapes: time, stage, and by how much, where `weigh` gives a whole tape."""
        for time, (stage, microbatch), full, reduced in _changes(self.events[rank]):
            yield time, stage, (full + self.memory.share_of(stage) * reduced) * weigh(stage, microbatch)


def _over_time(found: Iterator[tuple[float, int, float]], unit: float) -> tuple[tuple[float, float], ...]:
    """Changes that are counted in a unit, added up."""
    changes: dict[float, float] = {}
    for time, _, change in found:
        changes[time] = changes.get(time, 0) + change
    return tuple((time, live * unit) for time, live in zip(changes, accumulate(changes.values())))


def _op(step: Step) -> Op | None:
    return step.op if isinstance(step, Action) else None


def _computes(step: Step) -> bool:
    return not isinstance(step, Action) or step.op in COMPUTE


def _changes(events: Sequence[Event]) -> Iterator[tuple[float, tuple[int, int], int, int]]:
    """When a rank's live tapes change: time, stage and microbatch, and how many more are whole, and for W alone."""
    training = any(action.op in (Op.B, Op.W) for event in events for action in parts(event.action))
    for event in events:
        actions = parts(event.action)
        for action in actions:
            if action.op is Op.F:
                yield event.start, (action.stage, action.microbatch), 1, 0
        for action in actions:
            tape = (action.stage, action.microbatch)
            if action.op is Op.B or (action.op is Op.F and not training):
                yield event.end, tape, -1, 0
            elif action.op is Op.I:
                yield event.end, tape, -1, 1
            elif action.op is Op.W:
                yield event.end, tape, 0, -1


def _peak_live(events: Sequence[Event], memory: Memory) -> float:
    """The most tapes there are at once, in a rank's events in order."""
    full, peak = 0, 0.0
    reduced: dict[float, int] = {}  # by their share, for whole numbers add up exactly
    for _, (stage, _), more_full, more_reduced in _changes(events):
        full += more_full
        if more_reduced:
            share = memory.share_of(stage)
            reduced[share] = reduced.get(share, 0) + more_reduced
        peak = max(peak, full + sum(share * number for share, number in reduced.items()))
    return peak
