"""The watchdog: a thread that lets a rank that cannot go on say where it is, and ends it; it also answers peers.

Python's signal handlers and exceptions do not reach a main thread that is blocked inside a backend. This thread does
not depend on it: it reads the recorder, is woken by signals through a file descriptor, and ends the process itself.
"""

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch.distributed import ProcessGroup

from penstock.runtime.liveness import Processes, answer, listen
from penstock.runtime.trace import Recorder

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
    #: when peers were last asked, and those that did not answer, in words
    _asked_at: float = field(default=-math.inf, init=False)
    _absent: str = field(default="", init=False)
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
        listener = listen()
        self.recorder.processes = Processes.of(listener, group, pipeline)
        self._listener = listener
        self._writer.send(b"\0")

    def close(self) -> None:
        """Stop watching."""
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        self._closed.set()
        self._writer.send(b"\0")
        self._thread.join()
        for end in (self._reader, self._writer, self._listener):
            if end is not None:
                end.close()
        self.recorder.processes = None

    def _watch(self) -> None:
        while not self._closed.is_set():
            sockets = [self._reader] if self._listener is None else [self._reader, self._listener]
            readable, _, _ = select.select(sockets, [], [], min(1.0, self.timeout_s / 4))
            if self._reader in readable and set(self._reader.recv(64)) & {signal.SIGTERM, signal.SIGINT}:
                # A launcher passes on a signal that its workers may have been sent as well.
                now = time.monotonic()
                if not self._signalled_at or now > self._signalled_at[-1] + _SAME_SIGNAL_S:
                    self._signalled_at.append(now)
            if self._listener in readable:
                answer(self._listener, self.recorder.presence)
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
        if self._absent:
            return f"{reason}; {self._absent}"
        if self.recorder.processes is not None and now > self._asked_at + _ASK_AGAIN_S:
            self._asked_at = now
            # In a thread of its own: peers that ask at the same time need this one's answers.
            threading.Thread(target=self._ask, name="penstock asks", daemon=True).start()
        return None

    def _ask(self) -> None:
        processes = self.recorder.processes
        self._absent = "" if processes is None else processes.absent()
        with contextlib.suppress(OSError):  # the watchdog may have been closed meanwhile
            self._writer.send(b"\0")
