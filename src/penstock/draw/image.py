"""Timelines as SVG or PNG, one above the other on a shared axis of time."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from penstock.draw.boxes import DEFINITIONS, Box, Kind, Part, Row, boxes_of, kinds_in, number
from penstock.schedule import Timeline
from penstock.settings.durable import whole_file

FORMATS = (".svg", ".png")

_WIDTHS_IN = (9.0, 16.0)
_INCHES_PER_BOX = 0.17
_MARGIN_LEFT_IN, _MARGIN_RIGHT_IN = 0.75, 1.15
_HEADING_IN, _FOOT_IN, _GAP_IN, _BAND_IN = 0.66, 0.95, 0.18, 0.32
_ROW_HEIGHT = 0.84
_BESIDE_HEIGHT = 0.28
_FONT_SIZES = (8.5, 8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0)
_EM_PER_FIGURE = 0.64
# Where numbers would be smaller, time is cut into bands, one below the other.
_READABLE, _MOST_BANDS = 6.5, 4
GREY = "#5B6470"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    # Text stays text: smaller files that can be searched, and the same bytes for the same timeline.
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
}


def picture(path: str | Path, timelines: Sequence[Timeline], *, unit: str = "") -> None:
    """Draw timelines one above the other into a file, as SVG or PNG by its ending.

    `unit` is that of the timelines' times, such as "ms"; without it the axis just says "time". Boxes show their
    microbatch if it fits; a long timeline is cut into bands for it. A fused pair is a box with its forward above its
    backward; a rank's second local stage is paler than its first; a reduction is a stripe along the foot of its row,
    since it runs beside the compute. An existing file is overwritten.

    Raises: ValueError for an unsupported ending, or without timelines.
    """
    path = Path(path)
    check_path(path)
    if not timelines:
        raise ValueError("a picture needs at least one timeline")
    with matplotlib.rc_context(STYLE):
        figure = _figure(timelines, unit)
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG; an existing file is overwritten."""
    with whole_file(path) as new, warnings.catch_warnings():
        # A title may have any character; what the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(new, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def check_path(path: Path) -> None:
    """Refuse a file whose ending names no picture format.

    Raises: ValueError naming the supported endings.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot draw {path.name!r}: the file's ending must be one of {', '.join(FORMATS)}")


@dataclass(frozen=True)
class _Panel:
    """The axes of a timeline or of one band of it, from one time to another, and their size."""

    axes: Axes
    width_in: float
    height_in: float
    start: float
    end: float

    @property
    def points_per_time(self) -> float:
        return 72 * self.width_in / (self.end - self.start)


def _figure(timelines: Sequence[Timeline], unit: str) -> Figure:
    drawn = [boxes_of(timeline) for timeline in timelines]
    makespan = max((timeline.makespan for timeline in timelines), default=0.0) or 1.0
    row_in = 0.3 if max(map(len, drawn)) <= 16 else 0.2
    width = _width(drawn, makespan)
    plot_width = width - _MARGIN_LEFT_IN - _MARGIN_RIGHT_IN
    num_bands = _num_bands(drawn, 72 * plot_width / makespan)
    heights = [row_in * len(rows) for rows in drawn for _ in range(num_bands)]
    height = (
        sum(heights) + _HEADING_IN * len(drawn) + _BAND_IN * (num_bands - 1) + _GAP_IN * (len(drawn) - 1) + _FOOT_IN
    )
    figure = Figure(figsize=(width, height), facecolor="white")
    bottom, length = height, makespan / num_bands
    for timeline, rows in zip(timelines, drawn, strict=True):
        for band in range(num_bands):
            plot_height = row_in * len(rows)
            bottom -= plot_height + (_BAND_IN if band else _HEADING_IN)
            axes = figure.add_axes((_MARGIN_LEFT_IN / width, bottom / height, plot_width / width, plot_height / height))
            axes.set_xlim(band * length, (band + 1) * length)
            panel = _Panel(axes, plot_width, plot_height, band * length, (band + 1) * length)
            _rows(panel, rows, timeline.makespan)
            if not band:
                _heading(panel, timeline, unit)
            last = rows is drawn[-1] and band == num_bands - 1
            _axis(axes, len(rows), unit, shown=num_bands > 1 or last, last=last)
        bottom -= _GAP_IN
    _legend(figure, [row for rows in drawn for row in rows], _MARGIN_LEFT_IN / width)
    return figure


def _width(drawn: Sequence[tuple[Row, ...]], makespan: float) -> float:
    """Inches: enough for the number on an average box, within the limits of a page."""
    lengths = [box.end - box.start for rows in drawn for row in rows for box in row]
    average = sum(lengths) / len(lengths) if lengths else makespan
    wanted = _INCHES_PER_BOX * makespan / average + _MARGIN_LEFT_IN + _MARGIN_RIGHT_IN
    return min(max(wanted, _WIDTHS_IN[0]), _WIDTHS_IN[1])


def _num_bands(drawn: Sequence[tuple[Row, ...]], points_per_time: float) -> int:
    """The number of bands into which time is cut so that numbers can be read; 1 if they never could be."""
    size = min(_font_size(rows, points_per_time) for rows in drawn)
    wanted = ceil(_READABLE / size)
    return wanted if wanted <= _MOST_BANDS else 1


def _rows(panel: _Panel, rows: tuple[Row, ...], makespan: float) -> None:
    quads: dict[str, list[list[tuple[float, float]]]] = {}
    fits = _font_size(rows, panel.points_per_time)
    size = next((size for size in _FONT_SIZES if size <= fits), _FONT_SIZES[-1])
    for rank, row in enumerate(rows):
        quads.setdefault(Kind.IDLE.value.colour, []).append(_quad(0.0, makespan, rank, rank + 1))
        for box in sorted(row, key=lambda box: box.beside):
            step = 1 / len(box.parts)
            for index, part in enumerate(box.parts):
                upper, lower = rank + index * step, rank + (index + 1) * step
                if box.beside:
                    upper = lower - _BESIDE_HEIGHT
                else:
                    _label(panel, box, part, (upper + lower) / 2, size if step == 1 else 0.85 * size)
                quads.setdefault(_colour(part), []).append(_quad(box.start, box.end, upper, lower))
    width = _typical_width(rows) * panel.points_per_time
    line = 0.7 if width > 8 else 0.3 if width > 2.5 else 0.0
    for colour, corners in quads.items():
        edge = "white" if line and colour != Kind.IDLE.value.colour else "none"
        panel.axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=line))


def _quad(start: float, end: float, upper: float, lower: float) -> list[tuple[float, float]]:
    """The corners of a box; rows are slightly lower than their distance."""
    inset = (1 - _ROW_HEIGHT) / 2
    upper = upper + inset if upper == int(upper) else upper
    lower = lower - inset if lower == int(lower) else lower
    return [(start, upper), (end, upper), (end, lower), (start, lower)]


def _colour(part: Part) -> str:
    paler = min(0.66, 0.42 * part.local_stage)
    channels = [channel + (1 - channel) * paler for channel in to_rgb(part.kind.value.colour)]
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _typical_width(rows: tuple[Row, ...]) -> float:
    """The time that nine of ten boxes with a microbatch reach, to which the lines between boxes are fitted."""
    lengths = sorted(box.end - box.start for row in rows for box in row if box.parts[0].microbatch >= 0)
    return lengths[len(lengths) // 10] if lengths else 0.0


def _font_size(rows: tuple[Row, ...], points_per_time: float) -> float:
    """The largest size at which nine of ten numbers fit, so that one picture has one size."""
    sizes = sorted(
        _size_in((box.end - box.start) * points_per_time, str(part.microbatch))
        for row in rows
        for box in row
        for part in box.parts
        if part.microbatch >= 0
    )
    return sizes[len(sizes) // 10] if sizes else _FONT_SIZES[0]


def _size_in(points: float, text: str) -> float:
    """The font size at which a text is as wide as its box."""
    return points / (_EM_PER_FIGURE * len(text) + 0.2)


def _label(panel: _Panel, box: Box, part: Part, y: float, size: float) -> None:
    """Write a box's label into as much of the box as the panel shows, if it fits."""
    text = str(part.microbatch) if part.microbatch >= 0 else part.kind.value.letter
    start, end = max(box.start, panel.start), min(box.end, panel.end)
    if _size_in((end - start) * panel.points_per_time, text) >= size:
        ink = part.kind.value.ink if part.local_stage == 0 else "#1A1A1A"
        panel.axes.text((start + end) / 2, y, text, color=ink, fontsize=size, ha="center", va="center_baseline")


def _heading(panel: _Panel, timeline: Timeline, unit: str) -> None:
    """Title and figures above the rows, and each rank's own figures beside its row."""
    figures = [
        f"makespan {number(timeline.makespan)} {unit}".rstrip(),
        f"span {number(timeline.span_cost)} {unit}".rstrip(),
        f"bubble {timeline.bubble_rate:.2%}",
    ]
    inch = 1 / panel.height_in
    idle_at, live_at = 1 + 0.55 / panel.width_in, 1 + 1.0 / panel.width_in

    def write(x: float, y: float, text: str, **style: Any) -> None:
        panel.axes.text(x, 1 + y * inch, text, transform=panel.axes.transAxes, **style)

    write(0, 0.30, timeline.title, fontsize=11, fontweight="bold")
    write(0, 0.10, "    ".join(figures), color=GREY)
    write(idle_at, 0.06, "idle", color=GREY, ha="right", fontsize=8)
    write(live_at, 0.06, "peak\nlive", color=GREY, ha="right", fontsize=8)
    row = panel.height_in / len(timeline.events)
    for rank, (idle, live) in enumerate(zip(timeline.idle, timeline.peak_live_microbatches, strict=True)):
        share = idle / timeline.makespan if timeline.makespan else 0.0
        for x, text in ((idle_at, f"{share:.0%}"), (live_at, number(live))):
            write(x, -row * (rank + 0.5), text, ha="right", va="center", fontsize=8.5)


def _axis(axes: Axes, num_ranks: int, unit: str, *, shown: bool, last: bool) -> None:
    axes.set_ylim(num_ranks, 0)
    every = 1 if num_ranks <= 32 else 8
    axes.set_yticks([rank + 0.5 for rank in range(0, num_ranks, every)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(0, num_ranks, every)])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", color=GREY, labelcolor=GREY, labelsize=8, labelbottom=shown)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#C5CAD1")
    if last:
        axes.set_xlabel(f"time, {unit}" if unit else "time", color=GREY, fontsize=8, loc="right", labelpad=1)


def _legend(figure: Figure, rows: Sequence[Row], left: float) -> None:
    """The colours, and below them the figures that are not plain from their names."""
    handles = [Patch(facecolor=kind.value.colour, label=kind.value.word) for kind in kinds_in(rows)]
    parts = {part for row in rows for box in row for part in box.parts}
    later = [part for part in parts if part.local_stage > 0]
    if later:
        paler = min(later, key=lambda part: (part.local_stage, list(Kind).index(part.kind)))
        several = max(part.local_stage for part in later) > 1
        word = "paler: the rank's later stages" if several else "paler: the rank's second stage"
        handles.append(Patch(facecolor=_colour(paler), label=word))
    height = figure.get_size_inches()[1]
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left, 0.3 / height), ncols=len(handles), frameon=False,
        handlelength=1.1, handleheight=1.0, columnspacing=1.3, borderaxespad=0.4, borderpad=0.2, fontsize=8.5,
    )  # fmt: skip
    figure.text(left, 0.08 / height, "\n".join(DEFINITIONS), color=GREY, fontsize=7.5, va="bottom", linespacing=1.3)
