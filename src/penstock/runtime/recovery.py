"""A rank that cannot go on: recovery from a step that failed, and the watchdog that ends a process which stands still.

All ranks learn of a failed step at once, and can take the next one. Each rank has a thread that waits for a key in the
store where the run's processes met. A rank whose step fails writes there, for every rank, where and why. The threads
then cut all communicators, so that no main thread stays blocked in one; each ends its step, undoes what the step has
changed, and meets the others while they make new communicators.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, asdict, dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.parallel.host import answer_of_store
from penstock.parallel.renewable import Communicator, cut_off
from penstock.runtime.errors import PipelineError, StepError, has_lost_device, is_of_device, is_of_link, layer_notes
from penstock.runtime.layer_state import ModuleState, has_extra_state
from penstock.runtime.liveness import Processes, answer, listen, numbers
from penstock.runtime.stage import Stage
from penstock.runtime.trace import Recorder
from penstock.runtime.transport import default_store, unique_number
from penstock.settings.declare import words_of

_FOREVER = timedelta(days=30)
# A rank may see a neighbour's link close before it hears why.
_HEARSAY_S = 0.5
# How long the store may take to answer a rank that ends its step.
_ANSWER_S = 3.0
# How long a rank's thread may take to hear what has been announced, and to cut; only a busy machine lets it take long.
_CUT_S = 30.0
_END_S = 5.0
"""The longest that a process waits for its thread at the end; only a cut network lets it wait so long."""
_MOST_QUOTED = 2000


@dataclass(eq=False)
class StepState:
    """The buffers and extra state of the stages' modules, and torch's generators of random numbers."""

    #: the stages of this rank
    _stages: Iterable[Stage]
    #: the device whose random numbers count beside the host's
    _device: torch.device
    #: what the modules' state was before the step
    _before: list[ModuleState] = field(default_factory=list, init=False)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        """The modules that have such state."""
        modules = [module for stage in self._stages for _, unit in stage.units for module in unit.modules()]
        return [module for module in modules if module._buffers or has_extra_state(module)]

    @torch.no_grad()
    def save(self) -> None:
        """Note the state as it is before a step."""
        self._random = torch.get_rng_state()
        if self._device.type == "cuda":
            self._random_on_device = torch.cuda.get_rng_state(self._device)
        # What was held makes room first.
        self._before = []
        self._before = [ModuleState(module) for module in self._modules]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what `save` noted."""
        torch.set_rng_state(self._random)
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_on_device, self._device)
        for state in self._before:
            state.restore()


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, as it is announced to all."""

    rank: int
    #: the rank, its place, action and step, and what it raised
    text: str
    #: True if the rank has left for good
    left: bool = False
    #: True if weights may have been stepped on some ranks
    stepped: bool = False

    def __str__(self) -> str:
        text = self.text
        if self.stepped:
            text += "; it was in the optimizer's step, so weights may differ between ranks: load a checkpoint"
        return f"{text}; that rank has left" if self.left else text


class Alarm:
    """The failure of some rank in the step under way; whoever computes looks at it between actions."""

    #: None as long as all is well
    failure: Failure | None = None

    def check(self) -> None:
        """Raises: StepError if some rank has failed."""
        if self.failure is not None:
            raise StepError(str(self.failure))


@dataclass(eq=False)
class Recovery:
    """One rank's part in ending a failed step on all ranks alike; every rank of `group` makes one at the same point."""

    #: all ranks of the engine, on host memory; None for one that is alone
    group: InitVar[dist.ProcessGroup | None]
    #: knows what the rank is doing
    recorder: Recorder
    #: put back after a failure
    state: StepState
    #: this rank's coordinates, for messages; empty where there is one pipeline
    coordinates: str = ""
    #: rung by the failure of any rank
    alarm: Alarm = field(default_factory=Alarm, init=False)
    #: the reason why no further step can be taken; None as long as one can
    lost: str | None = field(default=None, init=False)
    #: the same where it can be once weights have been loaded
    uncertain: str | None = field(default=None, init=False)
    #: what is cut and made anew, in one order on all ranks
    communicators: list[Communicator] = field(default_factory=list, init=False)
    #: number of times that communicators have been made anew
    _generation: int = field(default=0, init=False)
    #: called after communicators were cut, and after they have been made anew
    _undo: list[Callable[[], None]] = field(default_factory=list, init=False)
    _redo: list[Callable[[], None]] = field(default_factory=list, init=False)
    #: True while an exception of this rank is unknown to the others
    _announces: bool = field(default=False, init=False)
    #: True while weights are stepped
    _stepping: bool = field(default=False, init=False)
    #: what a user's own code is asked for between actions, in a few words; empty where it is not
    _asked: str = field(default="", init=False)
    #: the longest that ranks wait for each other
    _limit: timedelta = field(default=_FOREVER, init=False)
    #: this rank and all others, by number
    _rank: int = field(default=0, init=False)
    _num_ranks: int = field(default=1, init=False)
    #: where failures are written for all ranks; None for a rank that is alone
    _store: Store | None = field(default=None, init=False)
    #: set once this rank's communicators are cut
    _is_cut: threading.Event = field(default_factory=threading.Event, init=False)
    #: waits for other ranks' failures, and ends that wait; None for a rank that is alone
    _watch: _Watch | None = field(default=None, init=False)
    _end_watch: Callable[[], object] | None = field(default=None, init=False)

    def __post_init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            self._rank, self._num_ranks = group.rank(), group.size()
            self._limit = group._get_backend(torch.device("cpu")).options._timeout
            prefix = f"penstock/recovery/{unique_number(group)}"
            self._store = PrefixStore(prefix, default_store())
            # A store's connection serves one call at a time, and the thread's lasts for the whole run.
            self._watch = _Watch(self, PrefixStore(prefix, default_store().clone()), self._rank)  # pyright: ignore[reportAttributeAccessIssue]
            self._watch.start()
            # At the interpreter's end too: a thread inside the store would then abort the process.
            self._end_watch = weakref.finalize(self, self._watch.end, self._store)

    def covers(self, communicator: Communicator) -> None:
        """Cut and renew this communicator too; all ranks that share it call this in the same order."""
        self.communicators.append(communicator)

    def around_renewal(self, undo: Callable[[], None], redo: Callable[[], None] | None = None) -> None:
        """Call `undo` once a failed step's messages are cut, and `redo` when all ranks can talk again."""
        self._undo.append(undo)
        if redo is not None:
            self._redo.append(redo)

    def check_usable(self) -> None:
        """Raises: PipelineError if no call is possible: after the end, or within another call of this rank."""
        if self.lost:
            raise PipelineError(self.lost)
        if self._asked or (self._announces and self.recorder.doing != "between actions"):
            raise PipelineError(
                f"the engine was called while it is {self._asked or self.recorder.doing}; a loss, a hook, a listener "
                "or an iterator cannot call it"
            )

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Within this context, between actions, a user's own code is asked for `what`: no call is possible."""
        self._asked = what
        try:
            yield
        finally:
            self._asked = ""

    def close(self) -> None:
        """Stop the thread; no step can be taken any more."""
        self.lost = self.lost or "this engine was closed; make another one"
        if self._end_watch is not None:
            self._end_watch()

    # ---- around a step

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within this context, the exception that any rank announces ends the step on all ranks.

        Raises:
            StepError: a rank has failed, this or another. All can go on as if the step had not been tried.
            PipelineError: no step is possible any more.
        """
        self.check_usable()
        if self.uncertain:
            raise PipelineError(self.uncertain)
        self.state.save()
        try:
            self.alarm.check()
            yield
        except BaseException as error:
            # What follows has time limits of its own, and may outlast the watchdog's for an action.
            self.recorder.give_up()
            failure = self._failure_behind(error)
            if failure is None:
                self._restore()
                if self._store is None:
                    for act in (*self._undo, *self._redo):
                        act()
                raise
            if not isinstance(error, Exception):
                raise
            self._recover(failure, error)
            raise self._step_error(failure) from error

    @contextmanager
    def announcing(self, stepping: bool = False) -> Iterator[None]:
        """Within this context, inside of `joined`, an exception is this rank's own, and is announced to the others.

        stepping: weights may change here, which nothing undoes.
        """
        before = self._announces, self._stepping
        self._announces, self._stepping = True, stepping
        try:
            yield
        except BaseException as error:
            # Of a link that gloo has closed the rank at its other end knows too, and the reason may be there.
            is_closed_link = isinstance(error, Exception) and is_of_link(error) and not is_of_device(error)
            if self._store is not None and not is_closed_link:
                self._announce(error)
            if stepping and self._store is None:
                why = words_of(error)
                self.uncertain = f"the optimizer's step failed ({why}), so weights may have moved: load a checkpoint"
            raise
        finally:
            self._announces, self._stepping = before

    # ---- announcing a failure, and hearing of it

    def _announce(self, error: BaseException) -> None:
        """Write the failure for every rank, unless another rank was first."""
        assert self._store is not None
        if self.alarm.failure is not None or self._store.add(f"{self._generation}/claims", 1) > 1:
            return
        place = self.coordinates and f" ({self.coordinates})"
        what = "; ".join([words_of(error), *layer_notes(error)])[:_MOST_QUOTED]
        failure = Failure(
            self._rank,
            f"rank {self._rank}{place} failed {self.recorder.doing}, step {self.recorder.step}: "
            f"{type(error).__name__}: {what}",
            left=not isinstance(error, Exception) or has_lost_device(error),
            stepped=self._stepping,
        )
        text = json.dumps(asdict(failure))
        for rank in range(self._num_ranks):
            self._store.set(_key(self._generation, rank), text)

    def _hear(self, failure: Failure) -> None:
        """Cut everything; called by the thread."""
        self.alarm.failure = failure
        try:
            cut_off(self.communicators)
        finally:
            self._is_cut.set()

    def _failure_behind(self, error: BaseException) -> Failure | None:
        """The announced failure because of which this rank's step ends with `error`; None if there is none."""
        if (store := self._store) is None:
            return None
        keys = (_key(self._generation, self._rank), f"{self._generation}/claims")
        is_link, gone = isinstance(error, Exception) and is_of_link(error), list[int]()
        if self.alarm.failure is None and is_link:
            self._is_cut.wait(_HEARSAY_S)

        def is_known() -> bool:
            """True if some rank has failed. Of a link that is gone, also notes who has left, as by `sys.exit`."""
            if is_link and store.check([_LEFT]):
                gone.extend(map(int, store.get(_LEFT).split()))
            return any(store.check([key]) for key in keys)

        # What the thread has heard, or will hear, it also cuts: before that nothing can be made anew.
        if self.alarm.failure is not None or answer_of_store(is_known, _ANSWER_S):
            self._is_cut.wait(_CUT_S)
        if gone and self.alarm.failure is None:
            error.add_note(f"ranks that have ended, or closed this engine: {numbers(gone)}")
        return self.alarm.failure

    def _recover(self, failure: Failure, error: Exception) -> None:
        """Undo the step, and make new communicators with all other ranks. Raises: StepError if one has left."""
        for undo in self._undo:
            undo()
        self._restore()
        if failure.left:
            self.lost = f"this engine cannot go on, since {failure}; start all processes again"
            raise self._step_error(failure) from error
        assert self._store is not None
        self._generation += 1
        uncertain = f"{self._generation}/uncertain"
        if self.uncertain:
            self._store.set(uncertain, self.uncertain)
        try:
            for communicator in self.communicators:
                communicator.renew(self._generation)
            self._meet()
            if self._store.check([uncertain]):
                self.uncertain = self._store.get(uncertain).decode()
        except RuntimeError as gone:
            self.lost = f"this engine cannot go on, since {failure}, and then not all ranks came back ({gone})"
            raise StepError(f"{failure}; after that not all ranks came back") from gone
        self.recorder.begin_step(self.recorder.step)
        self.alarm.failure = None
        self._is_cut.clear()
        assert self._watch is not None
        self._watch.resumed.set()
        for redo in self._redo:
            redo()
        if failure.stepped:
            self.uncertain = str(failure)

    def _restore(self) -> None:
        """Put back the layers' state; where a `set_extra_state` fails, no step is possible until weights are loaded."""
        try:
            self.state.restore()
        except Exception as error:
            self.uncertain = (
                f"rank {self._rank} could not put back its layers' state after a step that failed "
                f"({type(error).__name__}: {words_of(error)}), so it may have moved: load a checkpoint"
            )

    def _step_error(self, failure: Failure) -> StepError:
        error = StepError(str(failure))
        error.is_of_other_rank = failure.rank != self._rank
        return error

    def _meet(self) -> None:
        """Wait until all ranks have come here: one that failed again at once would cut what others still make."""
        assert self._store is not None
        if self._store.add(f"{self._generation}/renewed", 1) == self._num_ranks:
            self._store.set(f"{self._generation}/all renewed", "")
        self._store.wait([f"{self._generation}/all renewed"], self._limit)


# The key of the ranks that have closed the engine, or ended.
_LEFT = "left"


def _key(generation: int, rank: int) -> str:
    return f"{generation}/{rank}"


class _Watch(threading.Thread):
    """Waits for one failure after another, until `end` or the end of the store."""

    #: the part of this rank, its number, and where failures are written
    _recovery: weakref.ref[Recovery]
    _rank: int
    _store: Store
    #: number of failures so far
    generation: int
    #: set when the failed step has been undone
    resumed: threading.Event

    def __init__(self, recovery: Recovery, store: Store, rank: int) -> None:
        super().__init__(name="penstock recovery", daemon=True)
        self._recovery, self._store, self._rank = weakref.ref(recovery), store, rank
        self.generation = 0
        self.resumed = threading.Event()

    def run(self) -> None:
        while True:
            try:
                self._store.wait([_key(self.generation, self._rank)], _FOREVER)
                text = self._store.get(_key(self.generation, self._rank))
            except RuntimeError:
                return
            recovery = self._recovery()
            if not text or recovery is None:
                return
            recovery._hear(Failure(**json.loads(text)))
            del recovery
            self.resumed.wait()
            self.resumed.clear()
            self.generation += 1

    def end(self, store: Store) -> None:
        """End the thread, which only another connection to the store can wake, or the end of the store.

        Both may come at once where processes end together, so the thread is waited for in either case. At the end of
        the interpreter it must not come back from torch any more: it would find no interpreter, and abort the process.
        """

        def wake() -> bool:
            store.append(_LEFT, f"{self._rank} ")  # pyright: ignore[reportAttributeAccessIssue]  # torch leaves it out
            for generation in (self.generation, self.generation + 1):
                store.set(_key(generation, self._rank), "")
            return True

        self.resumed.set()
        answer_of_store(wake, _ANSWER_S)
        self.join(_END_S)


# ---- The watchdog: a thread that lets a rank that cannot go on say where it is, and ends it; it also answers peers
#
# Python's signal handlers and exceptions do not reach a main thread that is blocked inside a backend. This thread does
# not depend on it: it reads the recorder, is woken by signals through a file descriptor, and ends the process itself.


EXIT_CODE = 75
_SAME_SIGNAL_S = 1.0
# Longer than an answer may take.
_ASK_AGAIN_S = 2.5


@dataclass(eq=False)
class Watchdog:
    """Watches one rank's recorder until `close`."""

    #: says where the rank is
    recorder: Recorder
    #: an action under way for longer than this, and a margin in which the backend's own, more specific error may come
    #: first, ends the process with `EXIT_CODE` after one sentence on standard error
    timeout_s: float
    #: how long after a SIGTERM or SIGINT an action may still be under way where some process of the run has ended or
    #: does not answer, so that the step cannot be finished; and after a second signal in any case
    grace_s: float = 4.0
    #: the process ends this long after its first signal in any case
    shutdown_timeout_s: float = math.inf
    #: ends the process; another for tests
    end: Callable[[int], object] = os._exit
    #: when signals asked the rank to end; those within a second of each other count as one
    _signalled_at: list[float] = field(default_factory=list, init=False)
    #: when peers were last asked
    _asked_at: float = field(default=-math.inf, init=False)
    #: a pair of sockets by which signals wake the thread
    _reader: socket.socket = field(init=False)
    _writer: socket.socket = field(init=False)
    #: the interpreter's wake-up descriptor before this one
    _previous_fd: int | None = field(default=None, init=False)
    #: where other processes ask for the rank's place
    _listener: socket.socket | None = field(default=None, init=False)
    #: set by `close`
    _closed: threading.Event = field(default_factory=threading.Event, init=False)
    #: the thread that watches
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="penstock watchdog", daemon=True)
        self._thread.start()

    @classmethod
    def of_run(
        cls,
        recorder: Recorder,
        timeout_s: float,
        group: ProcessGroup | None,
        pipeline: Sequence[int],
        shutdown_timeout_s: float = math.inf,
    ) -> Self:
        """A watchdog that wakes on signals and answers peers; every rank makes one, in its main thread.

        `group` and `pipeline` are those of `answer_peers`.
        """
        watchdog = cls(recorder, timeout_s, shutdown_timeout_s=shutdown_timeout_s)
        watchdog.listen_to_signals()
        watchdog.answer_peers(group, pipeline)
        return watchdog

    def listen_to_signals(self) -> None:
        """Wake on SIGTERM and SIGINT even while the main thread is blocked; call it from the main thread.

        Their Python handlers stay as they are: set them first, for instance to ask for a stop after the step.
        """
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def answer_peers(self, group: ProcessGroup | None, pipeline: Sequence[int]) -> None:
        """Answer peers that ask where this rank is, and let its recorder ask them; all ranks call it.

        `group` is the world's, in host memory (None: this rank is alone), `pipeline` the global ranks of this one's.
        """
        if group is None:
            return
        self._listener = listener = listen()
        self.recorder.processes = Processes.of(listener, group, pipeline)
        answers = partial(answer, listener, lambda: self.recorder.presence)
        threading.Thread(target=answers, name="penstock answers", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        self._closed.set()
        self._writer.send(b"\0")
        self._thread.join()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._reader.close()
        self._writer.close()
        self.recorder.processes = None

    def _watch(self) -> None:
        while not self._closed.is_set():
            readable, _, _ = select.select([self._reader], [], [], min(1.0, self.timeout_s / 4))
            if readable and set(self._reader.recv(64)) & {signal.SIGTERM, signal.SIGINT}:
                # A launcher passes on a signal that its workers may have been sent as well.
                now = time.monotonic()
                if not self._signalled_at or now > self._signalled_at[-1] + _SAME_SIGNAL_S:
                    self._signalled_at.append(now)
            reason = self._reason_to_end()
            if reason is not None and not self._closed.is_set():
                sys.stderr.write(f"penstock: {self.recorder.where()}; {reason}\n")
                sys.stderr.flush()
                self.end(EXIT_CODE)
                return

    def _reason_to_end(self) -> str | None:
        if self.recorder.busy_since_s() > self.timeout_s + max(2.0, 0.1 * self.timeout_s):
            return f"this is over the limit of {self.timeout_s:g} s{self.recorder.missing()}"
        if not self._signalled_at:
            return None
        now, reason = time.monotonic(), "asked to end, and this cannot be finished"
        if now - self._signalled_at[0] > self.shutdown_timeout_s:
            return f"asked to end, and not done within {self.shutdown_timeout_s:g} s"
        if min(now - self._signalled_at[-1], self.recorder.unfinished_since_s()) <= self.grace_s:
            return None
        if len(self._signalled_at) > 1:
            return f"{reason}{self.recorder.missing()}"
        if self.recorder.processes is not None and now > self._asked_at + _ASK_AGAIN_S:
            self._asked_at = now
            if absent := self.recorder.processes.absent():
                return f"{reason}; {absent}"
        return None
