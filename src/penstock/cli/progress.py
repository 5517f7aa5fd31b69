"""Progress of a run on one rank: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from penstock.io.files import naming

# ---- Standard output that may be full or closed: its errors name it, and come once


NAME = "standard output"


class StandardOutput(io.FileIO):
    """The file below standard output. Once it takes no more, what else is printed goes nowhere, at Python's end too.

    Raises: OSError with `NAME` as its file, at the first write that fails.
    """

    def write(self, data: Any, /) -> int | None:
        try:
            with naming(NAME):
                return super().write(data)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise


def prepare() -> None:
    """Put `StandardOutput` below standard output, and open the standard files that this process was started without.

    Without them, files opened later would get their numbers, and be written into. Writing to standard output fails then
    as on a full disk.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    # A test, or a program that calls `main`, may have put something else in its place.
    if isinstance(sys.stdout, io.TextIOWrapper) and type(_raw(sys.stdout)) is io.FileIO and sys.stdout.fileno() == 1:
        sys.stdout.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(StandardOutput(1, "w", closefd=False)),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering or sys.stdout.write_through,
        )


def _raw(file: io.TextIOWrapper) -> object:
    return getattr(file.buffer, "raw", file.buffer)


def print_progress(text: str, file: TextIO) -> None:
    """Print a line at once. Where it cannot be printed, the work goes on without it, which standard error says."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        if error.filename == NAME:
            with contextlib.suppress(OSError):
                print(
                    f"penstock: {NAME}: {(error.strerror or str(error)).lower()}; going on without progress lines",
                    file=sys.stderr,
                )


# ---- Progress of a run on one rank: a live bar on a terminal, plain lines elsewhere


# Weight of one step in the running means behind the speed and the remaining time.
_STEP_SHARE = 0.1
_SECONDS_BETWEEN_LINES = 2.0


def show_log(level: str = "INFO") -> None:
    """Show the package's log on standard error, such as the rounds of a long search, from a level on.

    Each warning is shown once: a command may open the same folder several times.
    """
    # --help does without it.
    import logging

    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno < logging.WARNING or text not in shown:
            shown.add(text)
            return True
        return False

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(is_new)
    logger = logging.getLogger("penstock")
    logger.handlers = [handler]  # so that a second command in one process shows each line once, too
    logger.setLevel(level)


@dataclass(frozen=True)
class StepFigures:
    """The figures shown for one step."""

    step: int
    loss: float
    num_tokens: int
    step_time_s: float
    idle_share: float


class Progress:
    """Shows a run of `num_steps` steps on `file`; `clock` gives seconds."""

    #: steps of the whole run
    _num_steps: int
    #: where they are shown, and a clock in seconds
    _file: TextIO
    _clock: Callable[[], float]
    #: a line that is redrawn; None if the file is no terminal
    _bar: "LiveBar | None"
    #: when the last line was written
    _last_line_s: float
    #: means over the steps since then, and their number
    _tokens_per_s: float
    _step_time_s: float
    _idle_share: float
    _seen: int
    #: the last validation loss, as shown
    _validation: str

    def __init__(
        self, num_steps: int, first_step: int, file: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps, self._file, self._clock = num_steps, file, clock
        self._last_line_s = -math.inf
        self._tokens_per_s = self._step_time_s = self._idle_share = 0.0
        self._seen = 0
        self._validation = ""
        self._bar = LiveBar(num_steps, first_step, file) if file.isatty() else None

    def step(self, figures: StepFigures) -> None:
        """Show a completed step."""
        self._average(figures)
        text = self._text(figures)
        if self._bar is not None:
            self._bar.update(figures.step, text)
            return
        now = self._clock()
        # A log file should neither stay silent nor drown in lines; the first and last step are always shown.
        if now - self._last_line_s >= _SECONDS_BETWEEN_LINES or figures.step == self._num_steps:
            self._last_line_s = now
            self._print(f"step {figures.step:>{len(str(self._num_steps))}}/{self._num_steps}  {text}")

    def validated(self, step: int, loss: float) -> None:
        """Show the validation loss after `step`."""
        self._validation = f"  validation {loss:.4f}"
        if self._bar is None:
            self._print(f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  validation loss {loss:.4f}")

    def note(self, text: str) -> None:
        """Print a line that stays on screen."""
        if self._bar is not None:
            self._bar.note(text)
        else:
            self._print(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _average(self, figures: StepFigures) -> None:
        self._seen += 1
        # The first steps count in full, so that the figures are not pulled towards their start at zero.
        share = max(_STEP_SHARE, 1 / self._seen)
        self._step_time_s += share * (figures.step_time_s - self._step_time_s)
        self._idle_share += share * (figures.idle_share - self._idle_share)
        if figures.step_time_s > 0:
            self._tokens_per_s += share * (figures.num_tokens / figures.step_time_s - self._tokens_per_s)

    def _text(self, figures: StepFigures) -> str:
        left_s = (self._num_steps - figures.step) * self._step_time_s
        validation = self._validation if self._bar is not None else ""
        return (
            f"loss {figures.loss:.4f}{validation}  {self._tokens_per_s:,.0f} tokens/s  "
            f"idle {self._idle_share:4.1%}  {duration(left_s)} left"
        )

    def _print(self, text: str) -> None:
        print_progress(text, self._file)


class LiveBar:
    """One line of a terminal that is redrawn."""

    #: rich's bar, and the number of its only task
    _progress: Any
    _task: Any

    def __init__(self, num_steps: int, first_step: int, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
        # Drawing takes compute time from this rank; twice a second is enough to watch.
        self._progress = RichProgress(*columns, console=Console(file=file), refresh_per_second=2)
        self._task = self._progress.add_task("starting", total=num_steps, completed=first_step)
        self._progress.start()

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, description=text)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class LineProgress:
    """Shows how many lines of a file are done, beginning after `num_done`; `what` names them if they are not lines."""

    #: lines of the whole file, those done before, and their name
    _num_lines: int
    _first: int
    _what: str
    #: where they are shown, and a clock in seconds
    _file: TextIO
    _clock: Callable[[], float]
    #: a line that is redrawn; None if the file is no terminal
    _bar: LiveBar | None
    #: when counting began, and when the last line was written
    _start_s: float
    _last_line_s: float
    #: tokens so far
    _num_tokens: int

    def __init__(
        self,
        num_lines: int,
        num_done: int,
        file: TextIO,
        what: str = "line",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._num_lines, self._file, self._clock = num_lines, file, clock
        self._first, self._num_tokens = num_done, 0
        self._start_s, self._last_line_s = clock(), -math.inf
        self._bar = LiveBar(num_lines, num_done, file) if file.isatty() else None

    def update(self, num_done: int, num_tokens: int) -> None:
        """Show that `num_done` lines are done in all, `num_tokens` tokens more than at the last call."""
        self._num_tokens += num_tokens
        now = self._clock()
        spent_s = max(now - self._start_s, 1e-9)
        left_s = spent_s / max(num_done - self._first, 1) * (self._num_lines - num_done)
        text = f"{self._num_tokens / spent_s:,.0f} tokens/s  {duration(left_s)} left"
        if self._bar is not None:
            self._bar.update(num_done, text)
        elif now - self._last_line_s >= _SECONDS_BETWEEN_LINES or num_done == self._num_lines:
            self._last_line_s = now
            print_progress(f"{self._what} {num_done}/{self._num_lines}  {text}", self._file)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes: ``2:05``, ``3h07``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


# ---- A word now and then from what takes long and has nothing to count, such as reading weights or compiling layers


_SECONDS_BETWEEN_WAITS = 5.0


class Waiting:
    """Prints `what` and the seconds so far to `file` every few seconds until its `with` block ends; quick ones nothing.

    speaks: False on ranks that are to stay silent.
    """

    #: what is under way, and where that is said
    _what: str
    _file: TextIO
    #: seconds between two lines
    _every_s: float
    #: when the block began
    _start_s: float
    #: set when it has ended
    _ended: threading.Event
    #: prints meanwhile; None where nothing is to be said
    _thread: threading.Thread | None

    def __init__(self, what: str, file: TextIO, speaks: bool = True, every_s: float = _SECONDS_BETWEEN_WAITS) -> None:
        self._what, self._file, self._every_s = what, file, every_s
        self._start_s, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True) if speaks else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _speak(self) -> None:
        while not self._ended.wait(self._every_s):
            print_progress(f"{self._what}: {time.monotonic() - self._start_s:.0f} s so far", self._file)
