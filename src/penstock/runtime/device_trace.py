"""The trace of a rank whose host runs ahead of its device: times are those of marks on the device's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from penstock.runtime.trace import Awaited, Recorder
from penstock.schedule import Action, Op, Step
from penstock.schedule.recording import PeerWait, Record


class DeviceEvent(Protocol):
    """A mark on a device's stream, as `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """The time from here to another event, in ms, both of which the device has passed."""
        ...


def recorded_event() -> DeviceEvent:
    """An event on the current stream, after all that has been launched there."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, eq=False, slots=True)
class _Mark:
    """An event, and the host's time when it was recorded, which is never later than the device's."""

    event: DeviceEvent
    host_ns: int


@dataclass(eq=False, slots=True)
class _Span:
    """An action of the current step, with its marks if it computes."""

    #: the host's record of it
    record: Record
    #: where each of its messages was first needed
    awaited: list[_Mark] = field(default_factory=list)
    #: its beginning, when these were there, and its end; None where it has none
    start: _Mark | None = None
    end: _Mark | None = None


@dataclass(eq=False)
class DeviceRecorder(Recorder):
    """Marks where on its stream a device begins and ends each action that computes; all else takes it no time.

    What is asked while a step runs (`where`, `busy_since_s`) is of the host. Times of the records are read when they
    are asked for. Those of collectives are left out: they have streams of their own. So is decoding, whose batches are
    too short.
    """

    #: records an event on the device's stream
    event: Callable[[], DeviceEvent] = recorded_event
    #: the beginning of the step, and its actions that compute
    _origin: _Mark | None = field(default=None, init=False)
    _spans: list[_Span] = field(default_factory=list, init=False)
    #: False where actions are not marked
    _is_timed: bool = field(default=True, init=False)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._origin, self._spans = None, []
        # The mode of generation.
        self._is_timed = not torch.is_inference_mode_enabled()

    def begin(self, action: Step) -> Record:
        record = super().begin(action)
        if self._is_timed:
            self._origin = self._origin or self._mark()
            self._spans.append(_Span(record))
            if isinstance(action, Action) and action.op is Op.STEP:
                self._spans[-1].start = self._mark()
        return record

    def awaits(self, record: Record, awaited: Awaited) -> None:
        super().awaits(record, awaited)
        if self._is_timed:
            self._spans[-1].awaited.append(self._mark())

    def started(self, record: Record) -> None:
        super().started(record)
        if self._is_timed:
            self._spans[-1].start = self._mark()

    def end(self, record: Record) -> None:
        super().end(record)
        if self._is_timed and self._spans[-1].start is not None:
            self._spans[-1].end = self._mark()

    def _mark(self) -> _Mark:
        return _Mark(self.event(), time.perf_counter_ns())

    def records(self) -> list[Record]:
        """The current step's actions that have ended, with the device's times; waits for the last of them."""
        marks = [mark for span in self._spans for mark in (*span.awaited, span.start, span.end) if mark is not None]
        if self._origin is None or not marks:
            return []
        first = self._origin.event
        marks[-1].event.synchronize()
        # No mark is passed before it is recorded, and one is at once where the device was waiting for the host.
        shift_ns = max(mark.host_ns - _elapsed_ns(first, mark) for mark in [self._origin, *marks])
        now_ns, records = shift_ns, list[Record]()
        for span in self._spans:
            if span.start is None or span.end is None:
                records.append(replace(span.record, begin_ns=now_ns, start_ns=now_ns, end_ns=now_ns))
                continue
            since_ns = [shift_ns + _elapsed_ns(first, mark) for mark in span.awaited]
            start_ns, end_ns = (shift_ns + _elapsed_ns(first, mark) for mark in (span.start, span.end))
            waits = tuple(PeerWait(wait.rank, ns) for wait, ns in zip(span.record.waits, since_ns, strict=True))
            begin_ns = min([*since_ns, start_ns])
            records.append(replace(span.record, begin_ns=begin_ns, start_ns=start_ns, end_ns=end_ns, waits=waits))
            now_ns = end_ns
        return records

    def collective_rows(self) -> list[list[Any]]:
        return [replace(one, wait_ns=None, taken_ns=None, end_ns=None).row() for one in self.collective_records()]

    def idle_share(self, time_s: float) -> float:
        """The share of the time up to the optimizer's step in which no action computed.

        Only for that step's end would the host have to wait.
        """
        program, (step,) = self._spans[:-1], self._spans[-1:]
        assert self._origin is not None and step.start is not None, "asked after the optimizer's step"
        first = self._origin.event
        step.start.event.synchronize()
        ends = [(span.start.event, span.end.event) for span in program if span.start and span.end]
        whole = first.elapsed_time(step.start.event)
        return 1.0 - sum(start.elapsed_time(end) for start, end in ends) / whole if whole else 0.0


def _elapsed_ns(first: DeviceEvent, mark: _Mark) -> int:
    return round(first.elapsed_time(mark.event) * 1e6)
