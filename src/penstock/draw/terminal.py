"""A timeline in the terminal: one row a rank, like the figures of the papers, in colour if the terminal has it."""

import sys
from dataclasses import dataclass
from math import ceil, floor, log10

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock.draw.boxes import Kind, Part, Row, boxes_of, idle_spans, kinds_in, list_by_rank, number, one_at_a_time
from penstock.schedule import Timeline

_MIXED = "▒"
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_TICK_EVERY = 10
_MOST_BANDS = 4


@dataclass(frozen=True)
class _Canvas:
    """The columns of a row, `scale` of them to a unit of time."""

    columns: int
    scale: float
    coloured: bool

    def column(self, time: float) -> int:
        return min(self.columns, round(time * self.scale))


def in_terminal(timeline: Timeline, *, console: Console | None = None) -> None:
    """Print a timeline as wide as the terminal, with its legend and figures; without colour when output is a file."""
    console = console or Console(file=sys.stdout, highlight=False)
    coloured = console.color_system is not None and not console.no_color
    for line in drawing(timeline, width=console.width, coloured=coloured):
        console.print(line, no_wrap=True, crop=True, highlight=False, soft_wrap=False)


def drawing(timeline: Timeline, *, width: int = 80, coloured: bool = False) -> list[Text]:
    """The lines of a timeline's drawing, none longer than `width`.

    Each box shows its letter and microbatch as far as they fit. If boxes are narrower than a column, time is cut into a
    few bands, one below the other; where that does not do, a column shows what its rank did in that time: one thing,
    or several.
    """
    rows = tuple(one_at_a_time(row) for row in boxes_of(timeline))
    margin = len(f"rank {len(rows) - 1} ")
    columns = max(10, width - margin)
    canvases = [_fit(timeline, rows, columns * num_bands, coloured) for num_bands in range(1, _MOST_BANDS + 1)]
    readable = (canvas for canvas in canvases if not _is_dense(rows, canvas, most=0.1))
    canvas = next(readable, canvases[0])
    dense = _is_dense(rows, canvas)
    lines = [Text(timeline.title, style="bold")] if timeline.title else []
    drawn = [_dense_row(row, timeline.makespan, canvas) if dense else _row(row, canvas) for row in rows]
    axis = _axis(canvas)
    band = ceil(canvas.columns / ceil(canvas.columns / columns)) if canvas.columns else columns
    for start in range(0, max(1, canvas.columns), band):
        for rank, row in enumerate(drawn):
            line = Text(f"rank {rank}".ljust(margin), style="" if coloured else "none").append_text(
                row[start : start + band]
            )
            line.pad_right(margin + min(band, canvas.columns) - line.cell_len)
            lines.append(line)
        lines.append(Text(" " * margin).append_text(axis[start : start + band]))
    lines.extend(_legend(kinds_in(rows), canvas, dense, width))
    lines.extend(_figures(timeline, margin, width))
    for line in lines:
        line.truncate(width)
    return lines


def _fit(timeline: Timeline, rows: tuple[Row, ...], columns: int, coloured: bool) -> _Canvas:
    """Choose the scale: whole columns for the shortest action if it gets at least one, else the full width."""
    makespan = timeline.makespan or 1.0
    scale = columns / makespan
    shortest = min((box.end - box.start for row in rows for box in row if box.end > box.start), default=makespan)
    whole = int(scale * shortest * (1 + 1e-9))
    # Rounding down may waste some of the width. It gives equal boxes for equal times, but gains nothing for times
    # that differ (a measured step).
    if whole >= 1 and whole / (scale * shortest) > 0.6:
        scale = whole / shortest
    return _Canvas(round(makespan * scale), scale, coloured)


def _is_dense(rows: tuple[Row, ...], canvas: _Canvas, *, most: float = 0.5) -> bool:
    """Return whether more than a share of the boxes are narrower than a column."""
    lengths = sorted(box.end - box.start for row in rows for box in row)
    return bool(lengths) and lengths[int(most * len(lengths))] * canvas.scale < 1 - 1e-9


def _row(row: Row, canvas: _Canvas) -> Text:
    line, at = Text(), 0
    for box in row:
        start, end = max(at, canvas.column(box.start)), canvas.column(box.end)
        if end <= start:
            continue
        line.append(_idle(start - at, canvas))
        # A fused pair shares its time, and here its columns too.
        middle = start + (end - start + 1) // 2
        bounds = [start, end] if len(box.parts) == 1 else [start, middle, end]
        for part, left, right in zip(box.parts, bounds, bounds[1:]):
            line.append_text(_cell(part, right - left, canvas))
        at = end
    return line.append(_idle(canvas.columns - at, canvas))


def _idle(columns: int, canvas: _Canvas) -> Text:
    return Text(Kind.IDLE.value.letter * columns, style="dim" if canvas.coloured else "")


def _cell(part: Part, columns: int, canvas: _Canvas) -> Text:
    look = part.kind.value
    microbatch = str(part.microbatch) if part.microbatch >= 0 else ""
    if canvas.coloured:
        labels = (look.letter + microbatch, microbatch, look.letter if not microbatch else "")
        label = next((label for label in labels if len(label) <= columns), "")
        return Text(label.center(columns), style=_style(part))
    # Without colour every box begins with its letter, and a line runs to its end.
    label = look.letter + microbatch
    return Text((label if len(label) <= columns else look.letter).ljust(columns, "─"))


def _style(part: Part) -> Style:
    """A paler shade for every other microbatch and every further local stage, so that neighbours stay apart."""
    look = part.kind.value
    paler = min(0.6, 0.18 * (part.microbatch % 2) + 0.34 * part.local_stage)
    channels = [round(channel + (255 - channel) * paler) for channel in Color.parse(look.colour).get_truecolor()]
    return Style(color=look.ink if paler < 0.3 else "#1A1A1A", bgcolor=Color.from_rgb(*channels))


def _dense_row(row: Row, makespan: float, canvas: _Canvas) -> Text:
    columns: list[dict[Kind, float]] = [{} for _ in range(canvas.columns)]
    spans = [(box.start, box.end, part.kind, 1 / len(box.parts)) for box in row for part in box.parts]
    spans += [(start, end, Kind.IDLE, 1.0) for start, end in idle_spans(row, makespan)]
    for start, end, kind, weight in spans:
        left, right = start * canvas.scale, end * canvas.scale
        for column in range(int(left), min(canvas.columns, ceil(right))):
            overlap = min(right, column + 1) - max(left, column)
            columns[column][kind] = columns[column].get(kind, 0.0) + weight * overlap
    return Text().join(_dense_column(shares, canvas.coloured) for shares in columns)


def _dense_column(shares: dict[Kind, float], coloured: bool) -> Text:
    """One column: the letter of the kind that took nearly all of it; in colour, the two largest shares by height."""
    whole = sum(shares.values())
    order = sorted(shares, key=lambda kind: shares[kind], reverse=True)
    if whole <= 0 or shares.get(Kind.IDLE, 0.0) > 0.94 * whole:
        return Text(Kind.IDLE.value.letter, style="dim" if coloured else "")
    if coloured:
        lower, upper = sorted(order[:2] if len(order) > 1 else order * 2, key=list(Kind).index)
        eighths = round(8 * shares[lower] / (shares[lower] + shares[upper])) if lower is not upper else 8
        above = Style() if upper is Kind.IDLE else Style(bgcolor=upper.value.colour)
        return Text(_HEIGHTS[eighths], style=above + Style(color=lower.value.colour))
    if shares.get(Kind.IDLE, 0.0) > 0.5 * whole:
        return Text(Kind.IDLE.value.letter)
    busy = {kind: share for kind, share in shares.items() if kind is not Kind.IDLE}
    main = max(busy, key=lambda kind: busy[kind])
    return Text(main.value.letter if busy[main] > 0.9 * sum(busy.values()) else _MIXED)


def _axis(canvas: _Canvas) -> Text:
    """Times below their columns, as round as the width allows."""
    makespan = canvas.columns / canvas.scale
    room = max(1, canvas.columns // _TICK_EVERY)
    finest = 10.0 ** floor(log10(makespan / room))
    step = next(base * finest for base in (1, 2, 5, 10) if base * finest >= makespan / room)
    marks = [" "] * canvas.columns
    for tick in range(int(makespan / step * (1 + 1e-9)) + 1):
        label, at = number(tick * step), canvas.column(tick * step)
        if at + len(label) <= canvas.columns:
            marks[at : at + len(label)] = label
    return Text("".join(marks).rstrip(), style="dim" if canvas.coloured else "")


def _legend(kinds: tuple[Kind, ...], canvas: _Canvas, dense: bool, width: int) -> list[Text]:
    entries = []
    for kind in kinds:
        look = kind.value
        swatch = Style(color=look.ink, bgcolor=look.colour) if canvas.coloured and kind is not Kind.IDLE else Style()
        letter = f" {look.letter} " if canvas.coloured else look.letter
        entries.append(Text().append(letter, swatch).append(f" {look.word}"))
    if dense:
        shared = "a column split by height: more than one in that time"
        entries.append(Text(shared if canvas.coloured else f"{_MIXED} more than one in that time"))
    lines = [entries[0]]
    for entry in entries[1:]:
        if lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines


def _figures(timeline: Timeline, margin: int, width: int) -> list[Text]:
    live = list_by_rank(timeline.peak_live_microbatches)
    figures = f"makespan {number(timeline.makespan)}   span {number(timeline.span_cost)}"
    figures += f"   bubble {timeline.bubble_rate:.2%}"
    peaks = f"peak live microbatches by rank: {live}"
    if len(figures) + 3 + len(peaks) <= width:
        return [Text(f"{figures}   {peaks}")]
    return [Text(figures), Text(peaks)]
