"""Notes which lines of the package each test reaches, in every process that it starts; see tools/nearest_tests.py.

Python imports this module at its start where its folder is on the path.
"""

import os
import struct
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# A function's calls, and a call's lines, are followed until this many in a row have shown no new line.
CALLS, LINES = 12, 400
NOTE = struct.Struct("<HH")  # a file's place among the package's, and the line


class Reached:
    """Follows the package's functions, and writes each line once for each test and process."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        package = Path(__file__).parents[2] / "src" / "penstock"
        self.numbers = {str(path): number for number, path in enumerate(sorted(package.rglob("*.py")))}
        #: by a code's id: the calls that are still followed, the file's number, and the code itself, which keeps its id
        self.codes: dict[int, tuple[list[int], int, CodeType]] = {}
        self.notes = -1
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """From now on lines are those of the test that the folder names."""
        if self.notes >= 0:
            os.close(self.notes)
        test = (self.folder / "now").read_text()
        self.notes = os.open(self.folder / test, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.lines: set[tuple[int, int]] = set()
        for calls, _, code in self.codes.values():
            calls[0] = CALLS if code.co_filename in self.numbers else 0
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        known = self.codes.get(id(code))
        if known is None:
            number = self.numbers.get(code.co_filename, -1)
            known = self.codes[id(code)] = [CALLS if number >= 0 else 0], number, code
        calls, number, _ = known
        if not calls[0]:
            return None
        calls[0] -= 1
        lines, left = self.lines, LINES

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if event == "line":
                place = number, frame.f_lineno
                if place in lines:
                    left -= 1
                    frame.f_trace_lines = left > 0
                else:
                    lines.add(place)
                    left, calls[0] = LINES, CALLS
                    os.write(self.notes, NOTE.pack(*place))
            return line

        return line


if folder := os.environ.get("PENSTOCK_REACHED"):
    reached = Reached(folder)
