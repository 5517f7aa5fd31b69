"""A timeline in the terminal: one row a rank, like the figures of the papers, in colour if the terminal has it."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10
from textwrap import wrap

from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock.draw.layers import (
    WHAT_KEEPS,
    Box,
    Kind,
    Part,
    Row,
    boxes_of,
    drawn_length,
    figures_of,
    kinds_in,
    list_by_rank,
    one_at_a_time,
    short_number,
)
from penstock.schedule import Timeline

_TICK_EVERY = 10
# Lines that a drawing with all its numbers may have.
_MOST_LINES = 300
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class _Canvas:
    """The columns of a row before it is cut into bands, `scale` of them to a unit of time."""

    columns: int
    scale: float
    coloured: bool

    def column(self, time: float) -> int:
        # Unlike `round`, this gives boxes that last equally long equally many columns, give or take one.
        return min(self.columns, floor(time * self.scale + 0.5 + 1e-9))


Cell = tuple[Part, int, int, str]
"""One part of a box: its columns, from the first to behind the last, and what is written into the first of them."""


def in_terminal(timeline: Timeline, *, console: Console | None = None) -> None:
    """Print a timeline as wide as the terminal, with its legend and figures; without colour when output is a file."""
    console = console or Console(file=sys.stdout, highlight=False)
    coloured = console.color_system is not None and not console.no_color
    for line in drawing(timeline, width=console.width, coloured=coloured):
        console.print(line, no_wrap=True, crop=True, highlight=False, soft_wrap=False)


def drawing(timeline: Timeline, *, width: int = 80, coloured: bool = False) -> list[Text]:
    """The lines of a timeline's drawing, none longer than `width`.

    Each box bears its letter, its local stage and its microbatch; time is cut into bands, one below the other, until
    they fit. Where that would take hundreds of lines, one band has the letters of the actions that have room.
    """
    rows = tuple(one_at_a_time(row) for row in boxes_of(timeline))
    margin = len(f"rank {len(rows) - 1} ")
    columns = max(10, width - margin)
    canvas = _numbered(timeline, rows, columns, coloured)
    numbered = canvas is not None
    canvas = canvas or _fit(timeline, rows, columns, coloured)
    lines = [Text(timeline.title, style="bold")] if timeline.title else []
    cells = [[cell for box in row for cell in _cells(box, canvas)] for row in rows]
    drawn = [_row(row, canvas) for row in cells]
    edges = _edges(cells, canvas, columns)
    pieces = [row.divide([own[rank] for own in edges[1:-1]]) for rank, row in enumerate(drawn)]
    for band, (starts, ends) in enumerate(pairwise(edges)):
        for rank, row in enumerate(pieces):
            lead = f"rank {rank}".ljust(margin) + " " * (starts[rank] - min(starts))
            lines.append(Text(lead, style="" if coloured else "none").append_text(row[band]))
        lines.append(Text(" " * margin).append_text(_axis(canvas, columns, min(starts), min(ends))))
    lines.extend(_legend(rows, canvas, width))
    if not numbered and any(timeline.events):
        lines.append(Text("too long for its numbers here; a drawing in a .html file has them"))
    lines.extend(_figures(timeline, margin, width))
    for line in lines:
        line.truncate(width)
    return lines


def _numbered(timeline: Timeline, rows: tuple[Row, ...], columns: int, coloured: bool) -> _Canvas | None:
    """Choose a canvas on which every box has room for its label; None if that takes too many lines.

    A few short boxes of a measured step do without, rather than stretch all others.
    """
    with_number = [box for row in rows for box in row if box.parts[0].microbatch >= 0]
    needed = sorted(len(_label(box)) / (box.end - box.start) for box in with_number)
    if not needed:
        return None
    nearly = needed[int(0.9 * (len(needed) - 1))]
    scale = needed[-1] if needed[-1] <= 1.5 * nearly else nearly
    num_bands = max(1, ceil(drawn_length(timeline) * scale / columns - 1e-9))
    if num_bands * (len(rows) + 1) > _MOST_LINES:
        return None
    return _fit(timeline, rows, columns * num_bands, coloured, least=scale)


def _fit(timeline: Timeline, rows: tuple[Row, ...], columns: int, coloured: bool, least: float = 0.0) -> _Canvas:
    """Choose the scale: whole columns for the shortest action if it gets at least one, else the full width."""
    makespan = drawn_length(timeline) or 1.0
    scale = columns / makespan
    shortest = min((box.end - box.start for row in rows for box in row if box.end > box.start), default=makespan)
    whole = int(scale * shortest * (1 + 1e-9))
    # Rounding down may waste some of the width. It gives equal boxes for equal times, but gains nothing for times
    # that differ (a measured step).
    if whole >= 1 and whole / (scale * shortest) > 0.6 and whole / shortest >= least * (1 - 1e-9):
        scale = whole / shortest
    return _Canvas(round(makespan * scale), scale, coloured)


def _edges(cells: Sequence[Sequence[Cell]], canvas: _Canvas, columns: int) -> list[list[int]]:
    """The columns at which bands of about equal width begin and end, for each rank.

    They go through as few labels as possible; a rank whose label would be cut has it in the later band.
    """
    labels = [[(start, start + len(label)) for _, start, _, label in row] for row in cells]
    cuts = Counter(column for row in labels for start, end in row for column in range(start + 1, end))
    edges = [[0] * len(cells)]
    while (left := canvas.columns - (first := min(edges[-1]))) > columns:
        even = first + ceil(left / ceil(left / columns))
        choices = range(even - columns // 5, first + columns + 1)
        edge = min(choices, key=lambda edge: (cuts[edge], abs(edge - even)))
        edges.append([next((start for start, end in row if start < edge < end), edge) for row in labels])
    return [*edges, [canvas.columns] * len(cells)]


def _name(part: Part) -> str:
    """A part's letter, small but for the rank's first stage and numbered from its third, and its microbatch."""
    letter = part.kind.letter if part.local_stage == 0 else part.kind.letter.lower()
    stage = str(part.local_stage + 1).translate(_SUPERSCRIPTS) if part.local_stage > 1 else ""
    return letter + stage + part.number


def _label(box: Box) -> str:
    return "+".join(map(_name, box.parts))


def _cells(box: Box, canvas: _Canvas) -> list[Cell]:
    """The parts of a box with their labels, or letters alone where the label does not fit."""
    start, end = canvas.column(box.start), canvas.column(box.end)
    labels = [_name(part) for part in box.parts]
    if len(labels) == 2:
        # A fused pair shares its time, and here its columns too.
        fits = len(_label(box)) <= end - start
        middle = start + len(labels[0]) + 1 if fits else start + (end - start + 1) // 2
        bounds, labels[0] = [start, middle, end], labels[0] + "+" * fits
    else:
        bounds = [start, end]
    return [
        (part, left, right, label if len(label) <= right - left else label[: min(1, right - left)])
        for part, label, left, right in zip(box.parts, labels, bounds, bounds[1:])
    ]


def _row(cells: Sequence[Cell], canvas: _Canvas) -> Text:
    line, at = Text(), 0
    for part, start, end, label in cells:
        line.append_text(_idle(start - at, canvas))
        colour, ink = part.colours
        style = Style(color=ink, bgcolor=colour) if canvas.coloured else ""
        fill = part.kind.letter if part.kind is Kind.WAIT else " " if canvas.coloured else "─"
        line.append(label.ljust(end - start, fill), style)
        at = end
    return line.append_text(_idle(canvas.columns - at, canvas))


def _idle(columns: int, canvas: _Canvas) -> Text:
    return Text(Kind.IDLE.letter * columns, style="dim" if canvas.coloured else "")


def _axis(canvas: _Canvas, columns: int, start: int, end: int) -> Text:
    """Times below their columns, as round as the width allows."""
    makespan = canvas.columns / canvas.scale
    span = min(canvas.columns, columns) / canvas.scale
    room = max(1, min(canvas.columns, columns) // _TICK_EVERY)
    finest = 10.0 ** floor(log10(span / room))
    step = next(base * finest for base in (1, 2, 5, 10) if base * finest >= span / room)
    marks = [" "] * (end - start)
    for tick in range(int(makespan / step * (1 + 1e-9)) + 1):
        label, at = short_number(tick * step), canvas.column(tick * step) - start
        if at >= 0 and at + len(label) <= len(marks):
            marks[at : at + len(label)] = label
    return Text("".join(marks).rstrip(), style="dim" if canvas.coloured else "")


def _legend(rows: tuple[Row, ...], canvas: _Canvas, width: int) -> list[Text]:
    entries = []
    for kind in kinds_in(rows):
        swatch = Style(color=kind.ink, bgcolor=kind.colour) if canvas.coloured and kind is not Kind.IDLE else Style()
        letter = f" {kind.letter} " if canvas.coloured else kind.letter
        entries.append(Text().append(letter, swatch).append(f" {kind.word}"))
    # What names say besides the kind: later local stages, and fused pairs.
    last = max((part.local_stage for row in rows for box in row for part in box.parts), default=0)
    if last > 0:
        entries.append(Text("small letter: the rank's second stage" + " (f³: its third)" * (last > 1)))
    if any(len(box.parts) > 1 for row in rows for box in row):
        entries.append(Text("F+B a fused pair"))
    if any(part.keeps for row in rows for box in row for part in box.parts):
        entries.append(Text(WHAT_KEEPS))
    lines = [entries[0]]
    for entry in entries[1:]:
        if lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines


def _figures(timeline: Timeline, margin: int, width: int) -> list[Text]:
    if (hang := timeline.hang) is not None:
        told = [f"rank {rank} ".ljust(margin) + hang.describe_wait(rank) for rank in hang.waits]
        ring = [*(rank for rank, _ in hang.arrows), hang.arrows[-1][1]]
        words = "the cycle" if len(hang.arrows) > 1 else "what never comes"
        told.append(f"{words}: {' → '.join(f'rank {rank}' for rank in ring)}")
        return [Text(line) for own in told for line in wrap(own, width, subsequent_indent=" " * margin)]
    live = list_by_rank(timeline.peak_live_microbatches)
    figures = "   ".join(figures_of(timeline))
    peaks = f"peak live microbatches by rank: {live}"
    if len(figures) + 3 + len(peaks) <= width:
        return [Text(f"{figures}   {peaks}")]
    return [Text(figures), Text(peaks)]
