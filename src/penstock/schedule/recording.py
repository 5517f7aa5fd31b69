"""The record of a step that ran: when each action's turn came, for which rank it waited, when it was done.

Ranks send their records as rows of plain values, packed by `pack_action` and `pack_collective`; a JSON file holds the
same rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, isfinite
from typing import Any

from penstock.schedule.actions import COMPUTE, RECEIVES, SENDS, Op, Step, parts
from penstock.schedule.text import parse_step
from penstock.schedule.timeline import Event, Timeline

_DRAWN = COMPUTE | {Op.REDUCE_GRAD, Op.STEP}


class CollectiveKind(StrEnum):
    """The kinds of collectives that a trace tells apart; `SEND_RECEIVE` is a step round a ring."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SEND_RECEIVE = "send-receive"
    GRADIENTS = "gradient reduction"


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective of one rank; `wait` and `taken` are None where the rank never waited for it."""

    kind: CollectiveKind
    num_bytes: int
    #: When it was launched.
    launch: float
    #: When it was done.
    end: float
    #: When the rank could not go on without it.
    wait: float | None = None
    #: When the rank went on.
    taken: float | None = None

    @property
    def exposed(self) -> float:
        """The time that the rank waited for it."""
        return 0.0 if self.wait is None or self.taken is None else self.taken - self.wait

    @property
    def hidden(self) -> float:
        """The time that it was under way while the rank did something else."""
        return max(0.0, self.end - self.launch - self.exposed)


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """All collectives of one kind of one rank."""

    number: int = 0
    num_bytes: int = 0
    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def hidden_share(self) -> float:
        """The hidden part of the time under way; 1 where nothing was under way."""
        whole = self.exposed + self.hidden
        return self.hidden / whole if whole else 1.0

    @classmethod
    def of(cls, collectives: Sequence[RecordedCollective]) -> CollectiveTotal:
        return cls(
            len(collectives),
            sum(one.num_bytes for one in collectives),
            sum(one.exposed for one in collectives),
            sum(one.hidden for one in collectives),
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch of time in which a rank waited for a message from another."""

    #: The rank that was waited for.
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank."""

    action: Step
    #: When its turn came.
    begin: float
    #: When its inputs were there.
    start: float
    #: When it was done.
    end: float
    waits: tuple[Wait, ...] = ()

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Spent:
    """Where one rank's time went, in ms; together the fields are the recording's makespan."""

    compute: float = 0.0
    #: The time waited for messages, by the rank that sent them.
    waiting: Mapping[int, float] = field(default_factory=dict)
    #: The time in which compute actions waited for a collective.
    collectives: float = 0.0
    #: Starting sends and posting receives.
    transfers: float = 0.0
    #: Starting the gradient reductions, and waiting for them before the optimizer step.
    reduction: float = 0.0
    #: The optimizer step.
    step: float = 0.0
    #: What is left between the rank's actions.
    between: float = 0.0
    #: Before the rank's first action and after its last.
    outside: float = 0.0

    @property
    def idle(self) -> float:
        """The time in which the rank neither computed nor stepped."""
        return sum(self.waiting.values()) + self.collectives + self.reduction + self.between + self.outside


@dataclass(frozen=True)
class Recording:
    """One step of a pipeline as it was measured, in ms from a common 0.

    Unlike the `Timeline` made from it, it has the transfers, the waiting and the collectives too.
    """

    title: str
    #: The number of the training step.
    step: int
    stages_per_rank: int
    #: Each rank's actions in order.
    spans: tuple[tuple[Span, ...], ...]
    #: Each rank's collectives in the order of their launch.
    collectives: tuple[tuple[RecordedCollective, ...], ...] = ()

    @cached_property
    def makespan(self) -> float:
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @cached_property
    def timeline(self) -> Timeline:
        """Compute, reductions and optimizer steps as a timeline in ms."""
        return Timeline.from_events(
            [[Event(s.action, s.start, s.end) for s in rank if parts(s.action)[0].op in _DRAWN] for rank in self.spans],
            stages_per_rank=self.stages_per_rank,
            title=self.title,
        )

    @cached_property
    def waits(self) -> tuple[tuple[Wait, ...], ...]:
        """Each rank's waits for messages."""
        return tuple(tuple(wait for span in rank for wait in span.waits) for rank in self.spans)

    def spent(self) -> tuple[Spent, ...]:
        """Where each rank's time went."""
        collectives = self.collectives or ((),) * len(self.spans)
        return tuple(_spent(rank, own, self.makespan) for rank, own in zip(self.spans, collectives))

    def collective_totals(self) -> tuple[Mapping[CollectiveKind, CollectiveTotal], ...]:
        """Each rank's collectives, summed up by kind."""
        return tuple(
            {kind: CollectiveTotal.of([c for c in own if c.kind is kind]) for kind in sorted({c.kind for c in own})}
            for own in self.collectives
        )

    def to_json(self) -> dict[str, Any]:
        """The recording as plain values; `from_json` reads them. Times have 6 digits."""
        return {
            "title": self.title,
            "step": self.step,
            "unit": "ms",
            "stages_per_rank": self.stages_per_rank,
            "ranks": [[_span_row(span) for span in rank] for rank in self.spans],
            "collectives": [[_collective_row(one) for one in rank] for rank in self.collectives],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recording:
        """Read what `to_json` gave.

        Raises: ValueError saying what is wrong with it.
        """
        try:
            title, step, stages = str(values["title"]), int(values["step"]), int(values["stages_per_rank"])
            spans = tuple(tuple(_span(row) for row in rank) for rank in values["ranks"])
            collectives = tuple(tuple(_collective(row) for row in rank) for rank in values.get("collectives", ()))
        except KeyError as error:
            raise ValueError(f"it has no {error}") from None
        except TypeError as error:
            raise ValueError(f"it is built wrongly: {error}") from None
        if stages < 1 or not any(spans):
            raise ValueError("it holds no action of any rank")
        if collectives and len(collectives) != len(spans):
            raise ValueError(f"it has collectives of {len(collectives)} ranks, and actions of {len(spans)}")
        return cls(title, step, stages, spans, collectives)

    @classmethod
    def gathered(
        cls,
        ranks: Sequence[Sequence[Sequence[Any]]],
        collectives: Sequence[Sequence[Sequence[Any]]] = (),
        *,
        title: str,
        step: int,
        stages_per_rank: int,
    ) -> Recording:
        """Put together the rows that ranks packed, on clocks that agree; 0 is where the first of them began."""
        first = min((row[1] for rank in ranks for row in rank), default=0.0)
        spans = tuple(tuple(_span(row, first) for row in rank) for rank in ranks)
        found = tuple(tuple(_collective(row, first) for row in rank) for rank in collectives)
        return cls(title, step, stages_per_rank, spans, found)


def _spent(spans: Sequence[Span], collectives: Sequence[RecordedCollective], makespan: float) -> Spent:
    if not spans:
        return Spent(outside=makespan)
    by_op = dict.fromkeys(Op, 0.0)
    waiting: dict[int, float] = {}
    for span in spans:
        by_op[parts(span.action)[0].op] += span.duration
        for wait in span.waits:
            waiting[wait.rank] = waiting.get(wait.rank, 0.0) + wait.end - wait.start
    in_compute = _waited_within([(s.start, s.end) for s in spans if parts(s.action)[0].op in COMPUTE], collectives)
    in_step = _waited_within([(s.start, s.end) for s in spans if parts(s.action)[0].op is Op.STEP], collectives)
    compute = sum(by_op[op] for op in COMPUTE) - in_compute
    step = by_op[Op.STEP] - in_step
    transfers = sum(by_op[op] for op in SENDS | RECEIVES)
    reduction = by_op[Op.REDUCE_GRAD] + sum(_before_step(spans)) + in_step
    present = spans[-1].end - spans[0].begin
    return Spent(
        compute=compute,
        waiting=dict(sorted(waiting.items())),
        collectives=in_compute,
        transfers=transfers,
        reduction=reduction,
        step=step,
        between=present - compute - in_compute - sum(waiting.values()) - transfers - reduction - step,
        outside=makespan - present,
    )


def _before_step(spans: Sequence[Span]) -> Iterator[float]:
    """The waits for reductions: from the end of a program's last action to the optimizer step."""
    for before, span in pairwise(spans):
        if parts(span.action)[0].op is Op.STEP:
            yield span.begin - before.end


def _waited_within(stretches: Iterable[tuple[float, float]], collectives: Iterable[RecordedCollective]) -> float:
    """The time that a rank waited for collectives within stretches of its time, given as (start, end)."""
    waits = sorted((one.wait, one.exposed) for one in collectives if one.wait is not None)
    starts = [start for start, _ in waits]
    sums = [0.0, *accumulate(exposed for _, exposed in waits)]
    return sum(sums[bisect_left(starts, end)] - sums[bisect_left(starts, start)] for start, end in stretches)


def pack_action(action: Step, times: Iterable[float], waits: Iterable[tuple[int, float]]) -> list[Any]:
    """Pack an action as a row: text, begin, start, end, [[awaited rank, since], ...]."""
    return [str(action), *times, [[rank, since] for rank, since in waits]]


def pack_collective(kind: CollectiveKind, num_bytes: int, times: Iterable[float | None]) -> list[Any]:
    """Pack a collective as a row: kind, bytes, launch, end, wait, taken; the last two None where nobody waited."""
    return [str(kind), num_bytes, *times]


def _span_row(span: Span) -> list[Any]:
    times = (round(time, 6) for time in (span.begin, span.start, span.end))
    return pack_action(span.action, times, ((wait.rank, round(wait.start, 6)) for wait in span.waits))


def _collective_row(one: RecordedCollective) -> list[Any]:
    times = (one.launch, one.end, one.wait, one.taken)
    return pack_collective(one.kind, one.num_bytes, (None if time is None else round(time, 6) for time in times))


def _span(row: Sequence[Any], origin: float = 0.0) -> Span:
    """Read the row of an action whose times are counted from `origin`.

    Raises: ValueError naming the row if it is none.
    """
    try:
        text, *times, waits = row
        begin, start, end = (float(time) - origin for time in times)
        since = [(int(rank), float(time) - origin) for rank, time in waits]
        action = parse_step(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{row!r} is no recorded action: {error}") from None
    ends = [time for _, time in since[1:]] + [start]
    in_order = [begin, *(time for _, time in since), start, end]
    if action is None or in_order != sorted(in_order) or not all(map(isfinite, in_order)):
        raise ValueError(f"{row!r} is no recorded action: its times must be numbers in order")
    return Span(action, begin, start, end, tuple(Wait(rank, time, to) for (rank, time), to in zip(since, ends)))


def _collective(row: Sequence[Any], origin: float = 0.0) -> RecordedCollective:
    """Read the row of a collective whose times are counted from `origin`.

    Raises: ValueError naming the row if it is none.
    """
    try:
        kind, num_bytes, *times = row
        launch, end, wait, taken = (None if time is None else float(time) - origin for time in times)
        known = CollectiveKind(kind), int(num_bytes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{row!r} is no recorded collective: {error}") from None
    waited = [] if wait is None or taken is None else [(launch, wait), (wait, taken)]
    for one, other in [(launch, end), *waited]:
        if one is None or other is None or not one <= other < inf:
            raise ValueError(f"{row!r} is no recorded collective: its times must be numbers in order")
    assert launch is not None and end is not None
    return RecordedCollective(*known, launch, end, wait, taken)
