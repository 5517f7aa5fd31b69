"""A word now and then from what takes long and has nothing to count, such as reading weights or compiling layers."""

import threading
import time
from types import TracebackType
from typing import Self, TextIO

from penstock.cli.standard_files import print_progress

_SECONDS_BETWEEN_LINES = 5.0


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

    def __init__(self, what: str, file: TextIO, speaks: bool = True, every_s: float = _SECONDS_BETWEEN_LINES) -> None:
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
