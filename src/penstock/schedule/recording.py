"""The record of a step that ran: for each action, when its turn came, which ranks it waited for, and when it was done.

Ranks note `Record`s and `CollectiveRecord`s as they run, and send them as rows of plain values; a JSON file holds the
same rows. Times of a record are whole nanoseconds, times of a row and of all that is computed from records are ms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from penstock.schedule.actions import COMPUTE, TRANSFERS, Action, Op, Step, keepers, parts
from penstock.schedule.costs import Costs
from penstock.schedule.simulate import Event, Timeline
from penstock.schedule.text import parse_step

_DRAWN = frozenset(op for op in Op if op not in TRANSFERS)
_Rows: TypeAlias = Sequence[Sequence[Sequence[Any]]]
"""Each rank's rows."""


def escaped(text: str) -> str:
    r"""A text that somebody else has written, with its control characters as Python writes them, for a terminal.

    >>> escaped("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class CollectiveKind(StrEnum):
    """The kinds of collectives that a trace distinguishes; `SEND_RECEIVE` is a step round a ring."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SEND_RECEIVE = "send-receive"
    BROADCAST = "broadcast"
    GRADIENTS = "gradient reduction"


@dataclass(slots=True)
class CollectiveRecord:
    """One collective of one rank. On a GPU only its launch is known, by the host's time."""

    #: its kind, and the bytes that this rank gives
    kind: CollectiveKind
    num_bytes: int
    #: when it was launched
    launch_ns: int
    #: global ranks that take part; empty where they are not known
    ranks: tuple[int, ...] = ()
    #: when the rank could not go on without it; None if it never waited for it
    wait_ns: int | None = None
    #: when the rank went on; None if it never waited for it
    taken_ns: int | None = None
    #: when it was done (`taken_ns` where the backend does not report that); None until then, and where it is not known
    end_ns: int | None = None

    @property
    def exposed(self) -> float:
        """The time that the rank waited for it, as far as that is known."""
        return 0.0 if self.wait_ns is None or self.taken_ns is None else _ms(self.taken_ns - self.wait_ns)

    @property
    def hidden(self) -> float:
        """The time that it was in flight while the rank did something else, as far as that is known."""
        return 0.0 if self.end_ns is None else max(0.0, _ms(self.end_ns - self.launch_ns) - self.exposed)

    def row(self) -> list[Any]:
        """Kind, bytes, and four times in ms: launch, end, wait, taken; the last two None where nobody waited."""
        times_ns = (self.launch_ns, self.end_ns, self.wait_ns, self.taken_ns)
        return [str(self.kind), self.num_bytes, *(None if time_ns is None else _ms(time_ns) for time_ns in times_ns)]

    @classmethod
    def from_row(cls, row: Sequence[Any], origin_ns: int = 0) -> CollectiveRecord:
        """Read a row, with times from `origin_ns` on. Raises: ValueError or TypeError if it is none."""
        kind, num_bytes, launch, end, *waited = row
        if end is None:
            return cls(CollectiveKind(kind), int(num_bytes), _ns(launch) - origin_ns)
        launch, end = _in_order(row, [launch, end], origin_ns)
        wait, taken = (None, None) if None in waited else _in_order(row, waited, origin_ns)
        return cls(CollectiveKind(kind), int(num_bytes), launch, wait_ns=wait, taken_ns=taken, end_ns=end)


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """All collectives of one kind of one rank."""

    number: int = 0
    num_bytes: int = 0
    exposed: float = 0.0
    hidden: float = 0.0
    #: False where their times are not known, as on a GPU
    is_timed: bool = True

    @property
    def hidden_share(self) -> float:
        """The hidden part of the time in flight; 1 if nothing was in flight."""
        whole = self.exposed + self.hidden
        return self.hidden / whole if whole else 1.0

    @classmethod
    def of(cls, collectives: Sequence[CollectiveRecord]) -> CollectiveTotal:
        sums = (sum(getattr(one, name) for one in collectives) for name in ("num_bytes", "exposed", "hidden"))
        return cls(len(collectives), *sums, is_timed=all(one.end_ns is not None for one in collectives))


@dataclass(frozen=True, slots=True)
class Wait:
    """A period in which a rank waited for a message from another."""

    #: The awaited rank.
    rank: int
    start: float
    end: float


class PeerWait(NamedTuple):
    """The beginning of a wait for another rank's message; it lasted until the next one, or until the action started."""

    rank: int
    since_ns: int


@dataclass(slots=True)
class Record:
    """One action of one rank."""

    action: Step
    #: when its turn came
    begin_ns: int = 0
    #: when its inputs were there
    start_ns: int = 0
    #: when it was done; 0 until then
    end_ns: int = 0
    #: messages that it needed, in the order in which it waited for them
    waits: tuple[PeerWait, ...] = ()

    @property
    def begin(self) -> float:
        return _ms(self.begin_ns)

    @property
    def start(self) -> float:
        return _ms(self.start_ns)

    @property
    def end(self) -> float:
        return _ms(self.end_ns)

    @property
    def duration(self) -> float:
        return _ms(self.end_ns - self.start_ns)

    def stretches(self) -> Iterator[Wait]:
        """Its waits with their ends."""
        ends_ns = [*(wait.since_ns for wait in self.waits[1:]), self.start_ns]
        for (rank, since_ns), end_ns in zip(self.waits, ends_ns):
            yield Wait(rank, _ms(since_ns), _ms(end_ns))

    def row(self) -> list[Any]:
        """The action's text, begin, start and end in ms, and [[awaited rank, since], ...]."""
        return [str(self.action), self.begin, self.start, self.end, [[rank, _ms(since)] for rank, since in self.waits]]

    @classmethod
    def from_row(cls, row: Sequence[Any], origin_ns: int = 0) -> Record:
        """Read a row, with times from `origin_ns` on. Raises: ValueError or TypeError if it is none."""
        text, begin, start, end, waits = row
        times = _in_order(row, [begin, *(since for _, since in waits), start, end], origin_ns)
        waited = tuple(PeerWait(int(rank), since_ns) for (rank, _), since_ns in zip(waits, times[1:]))
        return cls(parse_step(text), times[0], times[-2], times[-1], waited)


@dataclass(frozen=True)
class Spent:
    """One rank's time in ms, by what it was spent on; the fields add up to the recording's makespan."""

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
    spans: tuple[tuple[Record, ...], ...]
    #: Each rank's collectives in the order of their launch.
    collectives: tuple[tuple[CollectiveRecord, ...], ...] = ()

    @cached_property
    def makespan(self) -> float:
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @cached_property
    def timeline(self) -> Timeline:
        """Compute, reductions and optimizer steps as a timeline in ms."""
        timeline = Timeline.from_events(
            [[Event(s.action, s.start, s.end) for s in rank if parts(s.action)[0].op in _DRAWN] for rank in self.spans],
            stages_per_rank=self.stages_per_rank,
            title=self.title,
        )
        return replace(timeline, measured=True)

    def costs(self, num_microbatches: int) -> Costs:
        """The mean times of this many microbatches, as if all stages were equal, to simulate the step with."""
        spent, each = dict.fromkeys(Op, 0.0), num_microbatches * len(self.spans)
        # By stage, the backwards of microbatches that were recomputed, and of those that kept all activations.
        backwards: dict[int, tuple[list[float], list[float]]] = {}
        for events in self.timeline.events:
            kept = keepers(event.action for event in events)
            for event in events:
                if isinstance(own := event.action, Action):
                    spent[own.op] += event.end - event.start
                    if own.op in (Op.B, Op.I):
                        of_stage = backwards.setdefault(own.stage, ([], []))
                        of_stage[(own.stage, own.microbatch) in kept].append(event.end - event.start)
        longer = [fmean(again) - fmean(not_again) for again, not_again in backwards.values() if again and not_again]
        recompute = max(0.0, fmean(longer)) if longer else 0.0
        spared = recompute * sum(len(not_again) for _, not_again in backwards.values())
        inputs = (spent[Op.B] + spent[Op.I] + spared) / each
        return Costs(
            forward=spent[Op.F] / each,
            backward_input=inputs,
            backward_weight=spent[Op.W] / each,
            step=spent[Op.STEP] / len(self.spans),
            recompute=min(recompute * self.stages_per_rank, inputs),
        )

    @cached_property
    def waits(self) -> tuple[tuple[Wait, ...], ...]:
        """Each rank's waits for messages."""
        return tuple(tuple(wait for span in rank for wait in span.stretches()) for rank in self.spans)

    def spent(self) -> tuple[Spent, ...]:
        """Each rank's time, by what it was spent on."""
        collectives = self.collectives or ((),) * len(self.spans)
        return tuple(_spent(rank, own, self.makespan) for rank, own in zip(self.spans, collectives))

    def collective_totals(self) -> tuple[Mapping[CollectiveKind, CollectiveTotal], ...]:
        """Each rank's collectives, summed up by kind."""
        return tuple(
            {kind: CollectiveTotal.of([c for c in own if c.kind is kind]) for kind in sorted({c.kind for c in own})}
            for own in self.collectives
        )

    def to_json(self) -> dict[str, Any]:
        """The recording as plain values; `from_json` reads them."""
        return {
            "title": self.title,
            "step": self.step,
            "unit": "ms",
            "stages_per_rank": self.stages_per_rank,
            "ranks": [[span.row() for span in rank] for rank in self.spans],
            "collectives": [[one.row() for one in rank] for rank in self.collectives],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recording:
        """Read what `to_json` gave.

        Raises: ValueError, LookupError or TypeError if it is something else.
        """
        recording = cls.gathered(
            values["ranks"],
            values.get("collectives", ()),
            title=escaped(str(values["title"])),
            step=int(values["step"]),
            stages_per_rank=int(values["stages_per_rank"]),
        )
        if recording.stages_per_rank < 1 or not any(recording.spans):
            raise ValueError("it holds no action of any rank")
        if recording.collectives and len(recording.collectives) != len(recording.spans):
            raise ValueError("it has collectives of other ranks than actions")
        return recording

    @classmethod
    def gathered(
        cls,
        ranks: _Rows,
        collectives: _Rows = (),
        *,
        title: str,
        step: int,
        stages_per_rank: int,
    ) -> Recording:
        """Put together the rows of ranks whose clocks agree; 0 is where the first of them began."""
        first_ns = _ns(min((row[1] for rank in ranks for row in rank), default=0.0))
        spans = tuple(tuple(Record.from_row(row, first_ns) for row in rank) for rank in ranks)
        launched = tuple(tuple(CollectiveRecord.from_row(row, first_ns) for row in rank) for rank in collectives)
        return cls(title, step, stages_per_rank, spans, launched)


def _spent(spans: Sequence[Record], collectives: Sequence[CollectiveRecord], makespan: float) -> Spent:
    if not spans:
        return Spent(outside=makespan)
    by_op = dict.fromkeys(Op, 0.0)
    waiting: dict[int, float] = {}
    for span in spans:
        by_op[parts(span.action)[0].op] += span.duration
        for wait in span.stretches():
            waiting[wait.rank] = waiting.get(wait.rank, 0.0) + wait.end - wait.start
    in_compute = _waited_within([(s.start, s.end) for s in spans if parts(s.action)[0].op in COMPUTE], collectives)
    in_step = _waited_within([(s.start, s.end) for s in spans if parts(s.action)[0].op is Op.STEP], collectives)
    compute = sum(by_op[op] for op in COMPUTE) - in_compute
    step = by_op[Op.STEP] - in_step
    transfers = sum(by_op[op] for op in TRANSFERS)
    # Reductions are waited for from the end of a program's last action to the optimizer step, and within it.
    before_step = [own.begin - last.end for last, own in pairwise(spans) if parts(own.action)[0].op is Op.STEP]
    reduction = by_op[Op.REDUCE_GRAD] + sum(before_step) + in_step
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


def _waited_within(stretches: Iterable[tuple[float, float]], collectives: Iterable[CollectiveRecord]) -> float:
    """The time that a rank waited for collectives within stretches of its time, given as (start, end)."""
    waits = sorted((_ms(one.wait_ns), one.exposed) for one in collectives if one.wait_ns is not None)
    starts = [start for start, _ in waits]
    sums = [0.0, *accumulate(exposed for _, exposed in waits)]
    return sum(sums[bisect_left(starts, end)] - sums[bisect_left(starts, start)] for start, end in stretches)


def _ms(time_ns: int) -> float:
    return time_ns / 1e6


def _ns(time_ms: Any) -> int:
    return round(float(time_ms) * 1e6)


def _in_order(row: object, times_ms: Iterable[Any], origin_ns: int) -> list[int]:
    """Times of a row in nanoseconds from `origin_ns` on. Raises: ValueError naming the row unless they ascend."""
    times_ns = [_ns(time_ms) - origin_ns for time_ms in times_ms]
    if times_ns != sorted(times_ns):
        raise ValueError(f"the times of {row!r} are not in order")
    return times_ns
