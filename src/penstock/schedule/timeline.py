"""Timelines, simulated or measured: when each rank did what, its span, bubble, idle time and live microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.schedule.actions import COMPUTE, Action, Op, Step, parts


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a rank with its start and end.

    >>> from penstock.schedule import Op
    >>> Event(Action(Op.F, 0, 3), start=1.0, end=2.5).end
    2.5
    """

    action: Step
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of live tapes.

    >>> Memory(weight_share=0.5, microbatch_bytes=100.0).bytes_of(stage=0, stages_per_rank=2)
    50.0

    Source: the share is M_W / M_B of Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
    """

    #: A microbatch counts 1 from its F to its I, and this from then until its W; one number, or one for each stage.
    weight_share: float | tuple[float, ...] = 1.0
    #: The bytes of one microbatch in all stages of a rank that it goes through, or those of each stage of the model.
    microbatch_bytes: float | tuple[float, ...] = 0.0
    #: A factor for each microbatch on its bytes, where microbatches differ in length.
    lengths: tuple[float, ...] = ()

    @property
    def has_bytes(self) -> bool:
        """Whether the bytes of a tape are known."""
        sizes = self.microbatch_bytes
        return any(sizes) if isinstance(sizes, tuple) else sizes > 0

    def share_of(self, stage: int) -> float:
        """The part of a stage's tape that is left after its I."""
        shares = self.weight_share
        return shares[stage % len(shares)] if isinstance(shares, tuple) else shares

    def bytes_of(self, stage: int, stages_per_rank: int) -> float:
        """The bytes of a stage's whole tape, where a microbatch goes through `stages_per_rank` stages of a rank."""
        sizes = self.microbatch_bytes
        return sizes[stage % len(sizes)] if isinstance(sizes, tuple) else sizes / stages_per_rank


@dataclass(frozen=True)
class Timeline:
    """Each rank's steps in time, simulated or measured.

    >>> from penstock.schedule import build, lower, simulate
    >>> timeline = simulate(lower(build("1f1b", ranks=2, microbatches=2)))
    >>> timeline.makespan, timeline.idle, timeline.peak_live_microbatches
    (9.0, (3.0, 3.0), (2.0, 1.0))

    Source: span and bubble as in Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 5.
    """

    #: Each rank's compute, reductions and optimizer step, in order; no transfers.
    events: tuple[tuple[Event, ...], ...]
    #: The time from 0 to the last end.
    makespan: float
    #: The longest time over ranks from a rank's own first start to its own end.
    span_cost: float
    #: The part of `span_cost` by which it exceeds the bare compute.
    bubble_rate: float
    #: The most live tapes of each rank, from the start of F to the end of the last backward, / `stages_per_rank`.
    peak_live_microbatches: tuple[float, ...]
    #: The part of the makespan in which each rank computes nothing.
    idle: tuple[float, ...]
    title: str = ""
    #: The number of stages that a microbatch goes through on a rank.
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
        """Make a timeline of events whose times count from a common 0.

        `compute` is the time a rank would take without waiting; by default that of the busiest rank.
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
        """The live microbatches of a rank over time: each time of a change, and their number from then on."""
        return _over_time(self._live(rank, lambda stage, microbatch: 1), 1 / self.stages_per_rank)

    def live_bytes(self, rank: int) -> tuple[tuple[float, float], ...]:
        """The bytes of a rank's live tapes over time: each time of a change, and their number from then on."""
        # A part of a rank's bytes may not add up exactly, so the unit is multiplied last.
        whole = self.memory.bytes_of(0, self.stages_per_rank) or 1
        return _over_time(self._live(rank, lambda *tape: self._tape_bytes(*tape) / whole), whole)

    @property
    def peak_live_bytes(self) -> tuple[float, ...]:
        """The most bytes of live tapes on each rank."""
        ranks = range(len(self.events))
        return tuple(max((live for _, live in self.live_bytes(rank)), default=0.0) for rank in ranks)

    def bytes_at_peak(self, rank: int) -> dict[int, float]:
        """The bytes that each of a rank's stages keeps at the peak of their sum.

        An action frees its tapes before the next one keeps any.
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
        """Each change of a rank's live tapes: time, stage and amount; `weigh` gives the amount of a whole tape."""
        for time, (stage, microbatch), full, reduced in _changes(self.events[rank]):
            yield time, stage, (full + self.memory.share_of(stage) * reduced) * weigh(stage, microbatch)


def _over_time(found: Iterator[tuple[float, int, float]], unit: float) -> tuple[tuple[float, float], ...]:
    """Add up changes that are counted in a unit."""
    changes: dict[float, float] = {}
    for time, _, change in found:
        changes[time] = changes.get(time, 0) + change
    return tuple((time, live * unit) for time, live in zip(changes, accumulate(changes.values())))


def _op(step: Step) -> Op | None:
    return step.op if isinstance(step, Action) else None


def _computes(step: Step) -> bool:
    return not isinstance(step, Action) or step.op in COMPUTE


def _changes(events: Sequence[Event]) -> Iterator[tuple[float, tuple[int, int], int, int]]:
    """Each change of a rank's live tapes: time, (stage, microbatch), whole tapes more, tapes for W alone more."""
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
    """The most tapes at once, given a rank's events in order."""
    full, peak = 0, 0.0
    reduced: dict[float, int] = {}  # by share: their number, since whole numbers add up exactly
    for _, (stage, _), more_full, more_reduced in _changes(events):
        full += more_full
        if more_reduced:
            share = memory.share_of(stage)
            reduced[share] = reduced.get(share, 0) + more_reduced
        peak = max(peak, full + sum(share * number for share, number in reduced.items()))
    return peak
