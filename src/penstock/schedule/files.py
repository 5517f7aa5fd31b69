"""Schedules and programs in files: read, lowered and proved, or refused with the fault's place in the file."""

import csv
import io
import re
from pathlib import Path

from penstock.io.files import UnfitFileError, read_text
from penstock.schedule.actions import Program, Schedule, ScheduleError, parts
from penstock.schedule.lower import lower
from penstock.schedule.text import Plan, from_csv, from_text, steps_by_place
from penstock.schedule.verify import verify

ENDINGS = (".csv", ".txt")
"""The file endings: torch's format, and Penstock's own."""

_HEAD = "penstock "
# The rank that a message names.
_RANK = re.compile(r"\brank (\d+)")


def is_file(name: str) -> bool:
    """True if a schedule's name is a file's."""
    return name.lower().endswith(ENDINGS)


def read(path: Path | str) -> Plan:
    """Read the schedule or program in a file without proving it. The file's first line shows its format.

    Raises: ScheduleError naming the file, the place in it and the rule that is broken.
    """
    return _parse(Path(path), text_of(Path(path)))


def read_program(path: Path | str, *, receives_ahead: int = 2, shared_channels: bool = False) -> Program:
    """Read the program in a file and prove it; a schedule is lowered first.

    Raises: ScheduleError naming the file, the place in it and the rule that is broken, with the proof's `hang`.
    """
    path = Path(path)
    text = text_of(path)
    plan = _parse(path, text)
    try:
        if isinstance(plan, Schedule):
            plan = lower(plan, receives_ahead=receives_ahead, shared_channels=shared_channels)
        verify(plan)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {_located(str(error), text)}", error.hang) from None
    return plan


def text_of(path: Path) -> str:
    if path.is_dir():
        raise ScheduleError(f"{path} is a folder; give a file ending in {' or '.join(ENDINGS)}")
    try:
        return read_text(path)
    except UnfitFileError as error:
        raise ScheduleError(str(error)) from None
    except OSError as error:
        raise ScheduleError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _parse(path: Path, text: str) -> Plan:
    try:
        return from_text(text) if text.startswith(_HEAD) else from_csv(text, name=path.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _located(fault: str, text: str) -> str:
    """Prefix a fault that a proof found with its place in the file."""
    rank = _RANK.search(fault)
    if rank is None:
        return fault
    line, words = _rows(text)[int(rank[1])]
    places = {str(action): at for at, step in reversed(steps_by_place(words).items()) for action in parts(step)}
    action = next((word for word in re.findall(r"\w+", fault[rank.end() :]) if word in places), None)
    row, cell = ("line", "word") if text.startswith(_HEAD) else ("row", "cell")
    return f"{row} {line}{'' if action is None else f', {cell} {places[action]}'}: {fault}"


def _rows(text: str) -> list[tuple[int, list[str]]]:
    """Each rank's row: its number in the file, counted from 1, and its words."""
    if not text.startswith(_HEAD):
        return list(enumerate(csv.reader(io.StringIO(text.removeprefix("\ufeff"))), start=1))
    lines = enumerate(text.splitlines(), start=1)
    return [(number, line.partition(":")[2].split()) for number, line in lines if line.startswith("rank ")]
