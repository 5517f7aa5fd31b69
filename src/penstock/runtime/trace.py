"""The trace: each rank's own record of what it did, in ring buffers, and the sentence that says where it is now."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.model.collectives import Work
from penstock.runtime.errors import TransportError, first_line
from penstock.runtime.travels import FollowedWork, Travel
from penstock.schedule import Event, Op, Step
from penstock.schedule.travels import CollectiveKind


@dataclass(frozen=True, slots=True)
class Awaited:
    """A message for which a rank waits: what `stage` on `rank` gives for a microbatch."""

    flow: Op
    stage: int
    microbatch: int
    rank: int

    def __str__(self) -> str:
        what = "the output" if self.flow is Op.F else "the gradient"
        return f"{what} of stage {self.stage} for microbatch {self.microbatch} from rank {self.rank}"


@dataclass(slots=True)
class Record:
    """One action of this rank; times in nanoseconds of the host's monotonic clock, 0 while not reached.

    `begin_ns` is when the action's turn came, `start_ns` when its input was there, `end_ns` when it was done. `waits`
    holds, for each message that it needed, from which rank and since when; it lasted until the next wait or the start.
    """

    action: Step
    begin_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    waits: tuple[tuple[int, int], ...] = ()


class Recorder:
    """The last `capacity` records of one rank's actions, and as many of its collectives, and what it is waiting for.

    Written by the executor between actions and by whoever launches a collective, read by anyone at any time, also from
    another thread. `rank` is that of the pipeline; `place` says which of several pipelines that is.
    """

    def __init__(self, rank: int, capacity: int = 65536, place: str | None = None) -> None:
        self.rank, self.capacity = rank, capacity
        self._name = f"rank {rank}" if place is None else f"rank {rank} ({place})"
        self.step = 0
        self.awaited: Awaited | Travel | None = None
        self._travels: deque[Travel] = deque(maxlen=capacity)
        self._records: list[Record] = []
        self._next = 0
        self._step_first = 0
        self._current: Record | None = None
        self._together: str | None = None

    def begin_step(self, step: int) -> None:
        """From here on records belong to `step`."""
        self.step = step
        self._step_first = self._next
        self._travels.clear()
        self._current = None
        self.awaited = None

    def begin(self, action: Step) -> Record:
        """The action's turn has come."""
        now = time.perf_counter_ns()
        record = Record(action, now, now)
        if len(self._records) < self.capacity:
            self._records.append(record)
        else:
            self._records[self._next % self.capacity] = record
        self._next += 1
        self._current = record
        return record

    def awaits(self, record: Record, awaited: Awaited) -> None:
        """The action needs a message; it may be there already."""
        self.awaited = awaited
        record.waits += ((awaited.rank, time.perf_counter_ns()),)

    def started(self, record: Record) -> None:
        """The awaited input is there; compute starts."""
        record.start_ns = time.perf_counter_ns()
        self.awaited = None

    def end(self, record: Record) -> None:
        record.end_ns = time.perf_counter_ns()

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """While all ranks do something together outside of the program; `what` completes "the ranks ...".

        Raises:
            TransportError: the backend gave up; the message says where the rank was.
        """
        self._together, start = what, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise TransportError(
                f"{self.where()}: gave up after {time.monotonic() - start:.1f} s ({first_line(error)})"
            ) from error
        finally:
            self._together = None

    def follow(self, kind: CollectiveKind, num_bytes: int, work: Work) -> Work:
        """Note a collective that has just been launched; what is given back is to be waited for in its place."""
        travel = Travel(kind, num_bytes, time.perf_counter_ns())
        self._travels.append(travel)
        return FollowedWork(work, travel, self._await_travel)

    def _await_travel(self, travel: Travel | None) -> None:
        self.awaited = travel

    def travels(self) -> list[Travel]:
        """The collectives that the current step has launched so far, in that order (the last `capacity` of them)."""
        return list(self._travels)

    def records(self) -> list[Record]:
        """The records of the current step, oldest first (the last `capacity` of them)."""
        first = max(self._step_first, self._next - self.capacity)
        return [self._records[i % self.capacity] for i in range(first, self._next)]

    def events(self) -> list[Event]:
        """The finished records of the current step as events in seconds, on the host's monotonic clock."""
        return [Event(r.action, r.start_ns * 1e-9, r.end_ns * 1e-9) for r in self.records() if r.end_ns]

    def busy_since_s(self) -> float:
        """For how long the action now under way has been under way; 0 between actions."""
        record = self._current
        if record is None or record.end_ns:
            return 0.0
        return (time.perf_counter_ns() - record.begin_ns) * 1e-9

    def where(self) -> str:
        """One sentence: the action this rank is in, what it waits for, from whom, and for how long."""
        record = self._current
        if self._together is not None:
            return f"{self._name}, step {self.step}: while the ranks {self._together}"
        if record is None:
            return f"{self._name}, step {self.step}: between steps"
        if record.end_ns:
            ago = (time.perf_counter_ns() - record.end_ns) * 1e-9
            return f"{self._name}, step {self.step}: finished {record.action} {ago:.1f} s ago"
        doing = f"waits for {self.awaited}" if self.awaited else "computes"
        return f"{self._name}, step {self.step}: in {record.action} for {self.busy_since_s():.1f} s, {doing}"
