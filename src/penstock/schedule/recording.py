"""What the ranks recorded of one step they ran: when each action's turn came, for whom it waited, when it was done."""

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


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch of time in which a rank waited for a message of another."""

    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Span:
    """One action: its turn came at `begin`, its inputs were there at `start`, it was done at `end`."""

    action: Step
    begin: float
    start: float
    end: float
    waits: tuple[Wait, ...] = ()

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Spent:
    """Where one rank's time went, in ms; together the fields are the recording's makespan.

    `waiting` has the time waited for messages by the rank that sent them, `collectives` the time in which compute
    actions waited for a collective. `transfers` is spent on starting sends and posting receives. `reduction` is the
    start of the gradient reductions and the wait for them before the optimizer `step`. `between` is what is left
    between a rank's actions, `outside` lies before its first and after its last.
    """

    compute: float = 0.0
    waiting: Mapping[int, float] = field(default_factory=dict)
    collectives: float = 0.0
    transfers: float = 0.0
    reduction: float = 0.0
    step: float = 0.0
    between: float = 0.0
    outside: float = 0.0

    @property
    def idle(self) -> float:
        """The time in which the rank neither computed nor stepped."""
        return sum(self.waiting.values()) + self.collectives + self.reduction + self.between + self.outside


@dataclass(frozen=True)
class Recording:
    """One step of a pipeline as it was measured: per rank its spans in order, in ms from a common 0.

    Unlike the `Timeline` made from it, it has the transfers too, and the waiting, and in `travels`, per rank, the
    collectives in the order of their launch.
    """

    title: str
    step: int
    stages_per_rank: int
    spans: tuple[tuple[Span, ...], ...]
    travels: tuple[tuple[Travel, ...], ...] = ()

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
        """Per rank, when it waited and for whom."""
        return tuple(tuple(wait for span in rank for wait in span.waits) for rank in self.spans)

    def spent(self) -> tuple[Spent, ...]:
        """Where each rank's time went."""
        travels = self.travels or ((),) * len(self.spans)
        return tuple(_spent(rank, own, self.makespan) for rank, own in zip(self.spans, travels))

    def travelled(self) -> tuple[Mapping[CollectiveKind, Travelled], ...]:
        """Per rank and kind, how much of the time in which collectives were under way was hidden."""
        return tuple({kind: travelled(kind, own) for kind in sorted({t.kind for t in own})} for own in self.travels)

    def to_json(self) -> dict[str, Any]:
        """Plain values; an action is a list [text, begin, start, end, [[awaited rank, since], ...]].

        A collective is a list [kind, bytes, launch, end, wait, taken], the last two null where nobody waited.
        """
        return {
            "title": self.title,
            "step": self.step,
            "unit": "ms",
            "stages_per_rank": self.stages_per_rank,
            "ranks": [[_to_row(span) for span in rank] for rank in self.spans],
            "collectives": [[travel_row(travel) for travel in rank] for rank in self.travels],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recording:
        """What `to_json` gave.

        Raises: ValueError saying what is wrong with it.
        """
        try:
            title, step, stages = str(values["title"]), int(values["step"]), int(values["stages_per_rank"])
            spans = tuple(tuple(_from_row(row) for row in rank) for rank in values["ranks"])
            travels = tuple(tuple(travel_from_row(row) for row in rank) for rank in values.get("collectives", ()))
        except KeyError as error:
            raise ValueError(f"it has no {error}") from None
        except TypeError as error:
            raise ValueError(f"it is built wrongly: {error}") from None
        if stages < 1 or not any(spans):
            raise ValueError("it holds no action of any rank")
        if travels and len(travels) != len(spans):
            raise ValueError(f"it has collectives of {len(travels)} ranks, and actions of {len(spans)}")
        return cls(title, step, stages, spans, travels)

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
        """The recording of the rows that the ranks packed on clocks that agree; 0 is where the first of them began."""
        first = min((row[1] for rank in ranks for row in rank), default=0.0)
        spans = tuple(tuple(_from_row(row, first) for row in rank) for rank in ranks)
        travels = tuple(tuple(travel_from_row(row, first) for row in rank) for rank in collectives)
        return cls(title, step, stages_per_rank, spans, travels)


def _spent(spans: Sequence[Span], travels: Sequence[Travel], makespan: float) -> Spent:
    if not spans:
        return Spent(outside=makespan)
    by_op = dict.fromkeys(Op, 0.0)
    waiting: dict[int, float] = {}
    for span in spans:
        by_op[parts(span.action)[0].op] += span.duration
        for wait in span.waits:
            waiting[wait.rank] = waiting.get(wait.rank, 0.0) + wait.end - wait.start
    in_compute = waits_inside([(s.start, s.end) for s in spans if parts(s.action)[0].op in COMPUTE], travels)
    in_step = waits_inside([(s.start, s.end) for s in spans if parts(s.action)[0].op is Op.STEP], travels)
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
    """From the end of the last action of a program to the optimizer step, ranks wait for the reductions."""
    for before, span in pairwise(spans):
        if parts(span.action)[0].op is Op.STEP:
            yield span.begin - before.end


def _to_row(span: Span) -> list[Any]:
    times = (round(time, 6) for time in (span.begin, span.start, span.end))
    return [str(span.action), *times, [[wait.rank, round(wait.start, 6)] for wait in span.waits]]


def _from_row(row: Sequence[Any], origin: float = 0.0) -> Span:
    """The span of a packed row, whose times are counted from `origin`.

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


class CollectiveKind(StrEnum):
    """What ranks do together, as the trace tells it apart; `SEND_RECEIVE` is a step round a ring."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SEND_RECEIVE = "send-receive"
    GRADIENTS = "gradient reduction"


@dataclass(frozen=True, slots=True)
class Travel:
    """One collective, under way from `launch` to `end`; its rank could not go on without it from `wait` to `taken`.

    The latter two are None where nobody waited.
    """

    kind: CollectiveKind
    num_bytes: int
    launch: float
    end: float
    wait: float | None = None
    taken: float | None = None

    @property
    def exposed(self) -> float:
        """How long the rank waited for it."""
        return 0.0 if self.wait is None or self.taken is None else self.taken - self.wait

    @property
    def hidden(self) -> float:
        """How long it was under way while the rank did something else."""
        return max(0.0, self.end - self.launch - self.exposed)


@dataclass(frozen=True, slots=True)
class Travelled:
    """All collectives of one kind of one rank: how many, how large, for how long waited for and for how long not."""

    number: int = 0
    num_bytes: int = 0
    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Of the time under way; 1 where nothing was."""
        whole = self.exposed + self.hidden
        return self.hidden / whole if whole else 1.0


def travelled(kind: CollectiveKind, travels: Iterable[Travel]) -> Travelled:
    own = [travel for travel in travels if travel.kind is kind]
    return Travelled(len(own), sum(t.num_bytes for t in own), sum(t.exposed for t in own), sum(t.hidden for t in own))


def waits_inside(stretches: Iterable[tuple[float, float]], travels: Iterable[Travel]) -> float:
    """How long a rank waited for collectives within stretches of its time, given as (start, end)."""
    waits = sorted((travel.wait, travel.exposed) for travel in travels if travel.wait is not None)
    starts = [start for start, _ in waits]
    sums = [0.0, *accumulate(exposed for _, exposed in waits)]
    return sum(sums[bisect_left(starts, end)] - sums[bisect_left(starts, start)] for start, end in stretches)


def travel_row(travel: Travel) -> list[Any]:
    times = (travel.launch, travel.end, travel.wait, travel.taken)
    return [str(travel.kind), travel.num_bytes, *(None if time is None else round(time, 6) for time in times)]


def travel_from_row(row: Sequence[Any], origin: float = 0.0) -> Travel:
    """The collective of a packed row, whose times are counted from `origin`.

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
    return Travel(*known, launch, end, wait, taken)
