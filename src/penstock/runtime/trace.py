"""The trace: each rank's own record of what it did, in ring buffers, and the sentence that says where it is now."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.profiler import record_function

from penstock.parallel.collectives import Handle
from penstock.runtime.errors import TransportError, first_line
from penstock.runtime.liveness import Presence, Processes, numbers
from penstock.schedule import Direction, Step, parts
from penstock.schedule.recording import CollectiveKind, CollectiveRecord, PeerWait, Record

# ---- Names in torch's profiler: of actions and layers, recorded only while a profiler is active


profiler_is_active: Callable[[], bool] = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
"""True while a profiler of torch's records this thread."""


def named_handler(name: str, handler: Callable[[Record], Any]) -> Callable[[Record], Generator[Any, None, None]]:
    """The handler of an action, which carries the name in the profile."""

    def run(record: Record) -> Generator[Any, None, None]:
        with record_function(name):
            waiting = handler(record)
            if waiting is not None:
                yield from waiting

    return run


def named_context(name: str, context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """The context, which carries the name in the profile if a profiler is active."""
    if not profiler_is_active():
        return context()
    stack = ExitStack()
    stack.enter_context(record_function(name))
    stack.enter_context(context())
    return stack


# ---- The trace: each rank's own record of what it did, in ring buffers, and the sentence that says where it is now


_KEPT_RECORDS = 65536


@dataclass(frozen=True, slots=True)
class Awaited:
    """A message that a rank waits for: the result of `stage` on `rank` for a microbatch."""

    direction: Direction
    stage: int
    microbatch: int
    rank: int

    def __str__(self) -> str:
        what = "the output" if self.direction is Direction.FORWARD else "the gradient"
        return f"{what} of stage {self.stage} for microbatch {self.microbatch} from rank {self.rank}"


@dataclass(frozen=True, eq=False)
class RecordedHandle(Handle[None]):
    """Notes when a collective is waited for and when it ends."""

    #: the backend's handle
    work: Handle[object]
    #: where times are noted
    record: CollectiveRecord
    #: learns what its rank waits for
    recorder: "Recorder"

    def __post_init__(self) -> None:
        # On a GPU, collectives count as done as soon as they are enqueued.
        if torch.cuda.is_available() or not hasattr(self.work, "get_future"):
            return
        # Done when the collective is, even if nobody waits for it; some backends have none.
        with suppress(RuntimeError):
            future: Future[Any] = self.work.get_future()  # type: ignore[attr-defined]
            future.add_done_callback(partial(_ended, self.record))

    def wait(self) -> None:
        """Raises TransportError when the collective does not end in time; the message says which it was."""
        record = self.record
        record.wait_ns = time.perf_counter_ns()
        self.recorder.awaited = record
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransportError(f"the {record.kind} failed ({first_line(error)})") from error
        record.taken_ns = time.perf_counter_ns()
        self.recorder.awaited = None
        if record.end_ns is None:
            record.end_ns = record.taken_ns


def _ended(record: CollectiveRecord, future: object) -> None:
    # Called by a thread of the backend, perhaps after the rank has gone on.
    if record.end_ns is None:
        record.end_ns = time.perf_counter_ns()


@dataclass(eq=False)
class Recorder:
    """The newest records of one rank's actions, and as many of its collectives, and what it is waiting for.

    The executor writes it between actions, and collectives as they are launched; any thread may read it at any time.
    """

    #: this rank's number in its pipeline
    rank: int
    #: names the pipeline where there are several
    coordinates: str | None = None
    #: the running step's number, or the last one's
    step: int = field(default=0, init=False)
    #: the message or collective that this rank is waiting for
    awaited: Awaited | CollectiveRecord | None = field(default=None, init=False)
    #: all processes of the run, if the watchdog has set them: reports then name hosts, and ranks that do not answer
    processes: Processes | None = field(default=None, init=False)
    #: actions and collectives of the current step
    _records: deque[Record] = field(default_factory=partial(deque, maxlen=_KEPT_RECORDS), init=False)
    _collectives: deque[CollectiveRecord] = field(default_factory=partial(deque, maxlen=_KEPT_RECORDS), init=False)
    #: the action under way, or the last one
    _current: Record | None = field(default=None, init=False)
    #: True once the action under way has failed
    _given_up: bool = field(default=False, init=False)
    #: while ranks act together outside of the program: the act, and the global ranks that take part (None: all)
    _together: tuple[str, tuple[int, ...] | None] | None = field(default=None, init=False)
    #: when that began, in seconds of the monotonic clock
    _together_since: float = field(default=0.0, init=False)
    #: group -> its global ranks
    _ranks: dict[dist.ProcessGroup, tuple[int, ...]] = field(default_factory=dict, init=False)

    def keep(self, num: int) -> None:
        """Keep only so many records from now on, the newest ones."""
        self._records = deque(self._records, maxlen=num)
        self._collectives = deque(self._collectives, maxlen=num)

    def begin_step(self, step: int) -> None:
        """Count the records that follow as those of `step`."""
        self.step = step
        self._records.clear()
        self._collectives.clear()
        self._current = None
        self.awaited = None

    def begin(self, action: Step) -> Record:
        """Note that the action's turn has come."""
        now = time.perf_counter_ns()
        self._current = record = Record(action, now, now)
        self._records.append(record)
        self._given_up = False
        return record

    def give_up(self) -> None:
        """Note that the action under way has failed, so that nobody waits for its end; `where` still names it."""
        self._given_up = True

    def awaits(self, record: Record, awaited: Awaited) -> None:
        """Note that the action needs a message, which may be there already."""
        self.awaited = awaited
        record.waits += (PeerWait(awaited.rank, time.perf_counter_ns()),)

    def started(self, record: Record) -> None:
        """Note that the awaited input is there, and that compute starts."""
        record.start_ns = time.perf_counter_ns()
        self.awaited = None

    def end(self, record: Record) -> None:
        """Note that the action is done."""
        record.end_ns = time.perf_counter_ns()

    @contextmanager
    def collective(self, what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Note, while the context lasts, an act of ranks outside of the program; `what` completes "the ranks ...".

        `group`: the ranks that take part; left out, all of them.

        Raises:
            TransportError: the backend gave up; the message says where the rank was, and which ranks do not answer.
        """
        self._together_since = start = time.monotonic()
        self._together = what, None if group is None else self._ranks_of(group)
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, TransportError | dist.DistError):
                # Named otherwise, such as memory that was short, it is no backend's.
                raise
            raise TransportError(
                f"{self.where()}: gave up after {time.monotonic() - start:.1f} s ({first_line(error)}){self.missing()}"
            ) from error
        finally:
            self._together = None

    def follow(
        self, kind: CollectiveKind, num_bytes: int, work: Handle[object], group: dist.ProcessGroup | None = None
    ) -> Handle[object]:
        """Note a collective that has just been launched; see `Observer`."""
        ranks = () if group is None else self._ranks.get(group) or self._ranks_of(group)
        record = CollectiveRecord(kind, num_bytes, time.perf_counter_ns(), ranks)
        self._collectives.append(record)
        return RecordedHandle(work, record, self)

    def _ranks_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        return self._ranks.setdefault(group, tuple(dist.get_process_group_ranks(group)))

    def collective_records(self) -> list[CollectiveRecord]:
        """The newest collectives that the current step has launched, in that order."""
        return list(self._collectives)

    def records(self) -> list[Record]:
        """The newest records of the current step, oldest first."""
        return list(self._records)

    def collective_rows(self) -> list[list[Any]]:
        """The rows of those of them that have ended; see `Recording`."""
        return [record.row() for record in self._collectives if record.end_ns]

    def idle_share(self, time_s: float) -> float:
        """The share of the current step's time, `time_s`, in which no action was under way that could start."""
        busy_s = sum([record.end_ns - record.start_ns for record in self._records if record.end_ns]) * 1e-9
        return 1.0 - busy_s / time_s

    def busy_since_s(self) -> float:
        """The time for which the current action has been under way; 0 between actions, and after one that failed."""
        record = self._current
        if record is None or record.end_ns or self._given_up:
            return 0.0
        return (time.perf_counter_ns() - record.begin_ns) * 1e-9

    def unfinished_since_s(self) -> float:
        """The time for which the current action, or act of ranks together, has been under way; 0 without any."""
        together_s = 0.0 if self._together is None else time.monotonic() - self._together_since
        return max(self.busy_since_s(), together_s)

    @property
    def doing(self) -> str:
        """This rank's place in a few words: "in" an action, or "between actions"."""
        record = self._current
        return "between actions" if record is None or record.end_ns else f"in {record.action}"

    @property
    def presence(self) -> Presence:
        """The answer of this rank to a peer that asks."""
        return self.where(), self.awaited is not None or self._together is not None

    def where(self) -> str:
        """One sentence: the action this rank is in, what it waits for, from whom, and for how long."""
        place = "" if self.coordinates is None else f" ({self.coordinates})"
        record, here = self._current, f"rank {self.rank}{place}, step {self.step}"
        if self._together is not None:
            what, ranks = self._together
            if isinstance(self.awaited, CollectiveRecord):
                return f"{here}: while the ranks {what}, {self._named(self.awaited)}"
            return f"{here}: while the ranks {what}{self._among(ranks)}"
        if record is None:
            return f"{here}: between steps"
        if record.end_ns:
            ago = (time.perf_counter_ns() - record.end_ns) * 1e-9
            return f"{here}: finished {record.action} {ago:.1f} s ago"
        doing = parts(record.action)[0].op.doing
        if self.awaited:
            doing = f"waits for {self._named(self.awaited)}"
        since_s = (time.perf_counter_ns() - record.begin_ns) * 1e-9
        return f"{here}: in {record.action} for {since_s:.1f} s, {doing}"

    def missing(self) -> str:
        """Name the ranks that this one waits for and that do not answer, to follow `where`; may take two seconds.

        Empty unless the processes are known.
        """
        if self.processes is None:
            return ""
        if isinstance(self.awaited, CollectiveRecord) and self.awaited.ranks:
            needed = self.awaited.ranks
        elif isinstance(self.awaited, Awaited):
            needed = (self.processes.pipeline[self.awaited.rank],)
        elif self._together is None:
            needed = self.processes.pipeline
        else:
            needed = self._together[1] or range(len(self.processes.every))
        missing = self.processes.missing(needed)
        return missing and f"; {missing}"

    def _named(self, awaited: Awaited | CollectiveRecord) -> str:
        if isinstance(awaited, Awaited):
            return str(awaited)
        ago_s = (time.perf_counter_ns() - awaited.launch_ns) * 1e-9
        named = f"the {awaited.kind} of {awaited.num_bytes} bytes that it launched {ago_s:.1f} s ago"
        return f"{named}{self._among(awaited.ranks)}" if awaited.ranks else named

    def _among(self, ranks: tuple[int, ...] | None) -> str:
        """The ranks of a group in words, None for all ranks."""
        if self.processes is not None:
            return f", among {self.processes.named(range(len(self.processes.every)) if ranks is None else ranks)}"
        return f", among processes {numbers(ranks)}" if ranks else ""
