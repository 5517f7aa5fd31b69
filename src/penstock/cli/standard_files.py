"""Standard output that may be full or closed: its errors name it, and come once."""

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from penstock.settings.durable import naming

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
