"""Output of commands: tables and JSON, progress, and files that are never lost."""

import fcntl
import hashlib
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from penstock.io.files import check_file, naming, parse_json, whole_file

if TYPE_CHECKING:
    from penstock.engine.training.trainer import TrainResult

# ---- Words, tables and JSON


def counted(count: int, what: str) -> str:
    """A count with its noun, in the singular for one."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def plain_number(value: float) -> float | None:
    """Round to the digits that fp32 has; None for infinity, which JSON cannot express."""
    return float(f"{value:.8g}") if math.isfinite(value) else None


def size_in_words(num_bytes: float, digits: int = 1) -> str:
    """A size of memory in the unit that suits it.

    >>> size_in_words(3 * 2**30), size_in_words(2**20), size_in_words(512)
    ('3.0 GiB', '1.0 MiB', '0.5 KiB')
    """
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.{digits}f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes: ``2:05``, ``3h07``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def digest_of(value: Any) -> str:
    """Sixteen characters that stand for a value of JSON."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def print_json(value: object) -> None:
    """Print one JSON document; numbers that JSON cannot express are an error."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def print_table(cells: Sequence[Sequence[str]], num_texts: int = 1) -> None:
    """Print rows of cells, the head first, in columns; all columns but the first `num_texts` hold numbers."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        texts = (cell.ljust(width) for cell, width in zip(row[:num_texts], widths))
        numbers = (cell.rjust(width) for cell, width in zip(row[num_texts:], widths[num_texts:]))
        print("  ".join([*texts, *numbers]).rstrip())


# ---- Files that no command overwrites, and those that take long to write


def refuse_to_overwrite(
    path: Path, *, force: bool = False, otherwise: str = "give another name, or --force to replace it"
) -> None:
    """Make sure that a file may be written.

    Raises: ValueError if it exists and `force` is not given, `otherwise` saying what to do, or if there is no folder
        for it.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists already and was left as it is; {otherwise}")


def check_drawing(path: Path | None, force: bool, *endings: Iterable[str]) -> None:
    """Make sure that a drawing may be written, if one is asked for. Raises: ValueError for what `path` cannot be."""
    if path is not None:
        # It loads the schedules, which most commands do without.
        from penstock.draw import check_ending

        check_ending(path, *endings)
        refuse_to_overwrite(path, force=force)


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all.

    Raises: ValueError as `refuse_to_overwrite` does; OSError with the path, such as that of a full disk.
    """
    refuse_to_overwrite(path, force=force)
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


class ResultsFile:
    """A file of results, a JSON object a line: under a hidden name, and under its own once it is complete.

    decisive: values of JSON that decide the results. A call with equal ones goes on after those that a stopped call
    left; with others it has another hidden name, so lines of different calls never mix. numbers: the fields of a
    result, whole numbers, by which results are told apart, and ordered in the end. As a context it is closed at the
    end; of a call that was refused nothing is left.

    Raises: ValueError if the file cannot be written, or another call is writing it. What fails later, such as a write
        to a full disk, is an OSError with `path`.
    """

    #: the file's name once it is complete, and until then
    path: Path
    hidden: Path
    #: the fields by which results are ordered
    _numbers: Sequence[str]
    #: the open file, which is locked, and how many results an earlier call has left there
    _file: Any
    _num_kept: int

    def __init__(self, path: Path, decisive: Any, numbers: Sequence[str]) -> None:
        self.path, self.hidden = path, path.with_name(f".{path.name}.{digest_of(decisive)}.unfinished")
        self._numbers = numbers
        try:
            # A link that somebody has put there could lead anywhere.
            check_file(self.hidden)
            descriptor = os.open(self.hidden, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            self._file = os.fdopen(descriptor, "a+b")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path} is being written by another call; wait, or give another --output") from None
        lines = self._lines()
        self._num_kept = len(lines)
        with naming(self.path):
            self._file.truncate(sum(len(line) for _, line in lines))

    def read(self) -> list[Any]:
        """The results so far, up to the first line that is cut short."""
        return [result for result, _ in self._lines()]

    def write(self, results: Iterable[Mapping[str, Any]], *, to_disk: bool) -> None:
        """Add results, which survive the death of the process and, with `to_disk`, that of the machine."""
        # What has no place in UTF-8, such as half of a pair in an "id", is written as JSON escapes it.
        texts = (json.dumps(result, ensure_ascii=False, allow_nan=False) for result in results)
        with naming(self.path):
            self._file.writelines(text.encode(errors="backslashreplace") + b"\n" for text in texts)
            self._file.flush()
            if to_disk:
                os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let another call continue the file; one that has nothing, or nothing but what was refused now, is removed."""
        if self._file.closed:
            return
        self._file.seek(0, os.SEEK_END)
        is_refused = kind is not None and issubclass(kind, ValueError) and not self._num_kept
        if self._file.tell() == 0 or is_refused:
            self.hidden.unlink(missing_ok=True)
        with naming(self.path):
            self._file.close()

    def publish(self) -> None:
        """Give the file its name, and its results their order; of those with equal numbers the last is taken.

        Raises: ValueError if a file of that name exists by now; the results stay in the hidden file.
        """
        whole = self.hidden.with_suffix(".whole")
        with naming(self.path):
            try:
                by_numbers = {tuple(result[name] for name in self._numbers): line for result, line in self._lines()}
                with whole.open("wb") as file:
                    file.writelines(by_numbers[numbers] for numbers in sorted(by_numbers))
                    file.flush()
                    os.fsync(file.fileno())
                self._file.close()
                # Unlike a rename, a link never takes another file's place.
                os.link(whole, self.path)
            except FileExistsError:
                raise ValueError(f"{self.path} exists by now; what should stand there is in {self.hidden}") from None
            finally:
                whole.unlink(missing_ok=True)
            self.hidden.unlink()

    def _lines(self) -> list[tuple[Any, bytes]]:
        """The results so far with their lines, up to the first that is cut short or is none."""
        self._file.seek(0)
        lines = []
        with suppress(ValueError):
            for line in takewhile(lambda line: line.endswith(b"\n"), self._file):
                result = parse_json(line)
                if not isinstance(result, dict) or any(type(result.get(name)) is not int for name in self._numbers):
                    break
                lines.append((result, line))
        return lines


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
    """Put `StandardOutput` below standard output.

    What has no place in its encoding and that of standard error, such as a file's name that is not UTF-8, is written
    escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # A test, or a program that calls `main`, may have put something else in its place.
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    raw: Any = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    if type(raw) is io.FileIO and sys.stdout.fileno() == 1:
        sys.stdout.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(StandardOutput(1, "w", closefd=False)),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering or sys.stdout.write_through,
        )


# ---- Progress, and the package's log


_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_WAITS = 5.0


def show_log(level: str = "INFO") -> None:
    """Show the package's log on standard error, such as the rounds of a long search, from a level on.

    Each line is shown once: a command may open the same folder several times.
    """
    # --help does without it.
    import logging

    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text, num_shown = record.getMessage(), len(shown)
        shown.add(text)
        return len(shown) > num_shown

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(is_new)
    logger = logging.getLogger("penstock")
    logger.handlers = [handler]  # so that a second command in one process shows each line once, too
    logger.setLevel(level)


def print_progress(text: str, file: TextIO) -> None:
    """Print a line at once. Where it cannot be printed, the work goes on without it, which standard error says."""
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        if error.filename == NAME:
            with suppress(OSError):
                print(
                    f"penstock: {NAME}: {(error.strerror or str(error)).lower()}; going on without progress lines",
                    file=sys.stderr,
                )


@dataclass(eq=False)
class Progress:
    """Says in lines how many of `total` steps, lines or answers are done, beginning after `done`.

    The first and the last are always said, others every few seconds: a log file should neither stay silent nor drown.
    """

    #: how many there are, those done before, where they are shown, their name, and what gives seconds
    total: int
    done: int
    file: TextIO
    what: str = "step"
    clock: Callable[[], float] = time.monotonic
    #: tokens so far
    num_tokens: int = field(default=0, init=False)
    #: when counting began, and when the last line was written
    _start_s: float = field(init=False)
    _last_line_s: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._start_s = self.clock()

    def step(self, taken: "TrainResult") -> None:
        speed = taken.num_tokens / taken.step_time_s if taken.step_time_s > 0 else 0.0
        left = duration((self.total - taken.step) * taken.step_time_s)
        figures = f"{speed:,.0f} tokens/s  idle {taken.idle_share:4.1%}  {left} left"
        self._show(taken.step, f"loss {taken.loss:.4f}  {figures}")

    def count(self, done: int, num_tokens: int) -> None:
        """Show that so many are done in all, `num_tokens` tokens more than at the last call."""
        spent_s = max(self.clock() - self._start_s, 1e-9)
        left_s = spent_s / max(done - self.done, 1) * (self.total - done)
        self.num_tokens += num_tokens
        self._show(done, f"{self.num_tokens / spent_s:,.0f} tokens/s  {duration(left_s)} left")

    def note(self, done: int, text: str) -> None:
        """Print a line on what has been done so far."""
        print_progress(f"{self.what} {done:>{len(str(self.total))}}/{self.total}  {text}", self.file)

    def _show(self, done: int, text: str) -> None:
        now = self.clock()
        if now - self._last_line_s >= _SECONDS_BETWEEN_LINES or done == self.total:
            self._last_line_s = now
            self.note(done, text)


@contextmanager
def waiting(what: str, file: TextIO, speaks: bool = True, every_s: float = _SECONDS_BETWEEN_WAITS) -> Iterator[None]:
    """Print `what` and the seconds so far to `file` every few seconds inside the block; of a quick one nothing.

    speaks: False on ranks that are to stay silent.
    """
    start_s, ended = time.monotonic(), threading.Event()

    def speak() -> None:
        while not ended.wait(every_s):
            print_progress(f"{what}: {time.monotonic() - start_s:.0f} s so far", file)

    thread = threading.Thread(target=speak, daemon=True)
    if speaks:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if speaks:
            thread.join()
