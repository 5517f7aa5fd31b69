"""Timelines as SVG or PNG, one above the other on a shared axis of time."""

import warnings
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from penstock.draw.layers import (
    DEFINITIONS,
    PICTURES,
    WHAT_KEEPS,
    Box,
    Kind,
    Part,
    Row,
    boxes_of,
    check_ending,
    drawn_length,
    figures_of,
    kinds_in,
    short_number,
)
from penstock.io.files import whole_file
from penstock.schedule import Timeline
from penstock.schedule.rehearsal import MemoryKind, Rehearsal

_WIDTHS_IN = (9.0, 16.0)
_INCHES_PER_BOX = 0.17
_MARGIN_LEFT_IN, _MARGIN_RIGHT_IN = 0.75, 1.15
_BESIDE_HANG_IN, _LINE_IN, _CHARACTERS_PER_IN = 2.7, 0.16, 14.5
_HEADING_IN, _FOOT_IN, _GAP_IN, _BAND_IN = 0.66, 0.95, 0.18, 0.32
_ROW_HEIGHT = 0.84
_BESIDE_HEIGHT = 0.28
_FONT_SIZES = (8.5, 8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0)
_EM_PER_FIGURE = 0.64
# Where numbers would be smaller, time is cut into bands, one below the other.
_READABLE, _MOST_BANDS = 6.5, 4
GREY = "#5B6470"
_OF_A_HANG = (
    "All that can be carried out before the hang; then each rank that waits for ever, with what it waits for.",
    "An arrow leads from a waiting rank to the one that it waits for.",
)
# What an SVG has in another colour for those who prefer dark pages; all else ignores these rules. Ink on the ground is
# grey or black, that on boxes is not: it stays, as they do.
_DARK = {
    "#ffffff": "#151a20",
    "#000000": "#e8ebef",
    "#5b6470": "#9ca7b4",
    "#c5cad1": "#3a434e",
    "#eceef1": "#242c36",
    "#4a4a4a": "#6b7682",
    "#34506b": "#3f6488",
    "#c9ced4": "#4a525c",
    "#d9d9d9": "#4a525c",
    "#c9d6e2": "#8fa3b5",
    "#f7ddd0": "#3d2519",
    "#e5ae93": "#6e4632",
    "#a33c00": "#ffb38f",
}
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
    check_ending(path, PICTURES)
    if not timelines:
        raise ValueError("a picture needs at least one timeline")
    drawn = [boxes_of(timeline) for timeline in timelines]
    makespan = max(map(drawn_length, timelines)) or 1.0
    hangs = any(timeline.hang for timeline in timelines)
    margin_right = _BESIDE_HANG_IN if hangs else _MARGIN_RIGHT_IN
    row_in = 0.3 if max(map(len, drawn)) <= 16 else 0.2
    lengths = [box.end - box.start for rows in drawn for row in rows for box in row]
    average = sum(lengths) / len(lengths) if lengths else makespan
    # Enough for the number on an average box, within the limits of a page.
    wanted = _INCHES_PER_BOX * makespan / average + _MARGIN_LEFT_IN + margin_right
    width = min(max(wanted, _WIDTHS_IN[0]), _WIDTHS_IN[1])
    plot_width = width - _MARGIN_LEFT_IN - margin_right
    line = int(_CHARACTERS_PER_IN * (plot_width + margin_right - 0.2))
    said = [fill(t.hang.sentence, line) if t.hang else "    ".join(figures_of(t, unit)) for t in timelines]
    headings = [_HEADING_IN + _LINE_IN * text.count("\n") for text in said]
    # Bands so that numbers can be read; one if they never could be.
    num_bands = ceil(_READABLE / min(_font_size(rows, 72 * plot_width / makespan) for rows in drawn))
    num_bands = num_bands if num_bands <= _MOST_BANDS else 1
    heights = [row_in * len(rows) for rows in drawn for _ in range(num_bands)]
    height = sum(heights) + sum(headings) + _BAND_IN * (num_bands - 1) + _GAP_IN * (len(drawn) - 1) + _FOOT_IN
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        bottom, length = height, makespan / num_bands
        for timeline, rows, figures, heading in zip(timelines, drawn, said, headings, strict=True):
            for band in range(num_bands):
                size = plot_width, row_in * len(rows)
                bottom -= size[1] + (_BAND_IN if band else heading)
                axes = figure.add_axes((_MARGIN_LEFT_IN / width, bottom / height, plot_width / width, size[1] / height))
                axes.set_xlim(band * length, (band + 1) * length)
                _rows(axes, 72 * plot_width / length, rows, drawn_length(timeline))
                if not band:
                    _heading(axes, size, timeline, figures)
                if timeline.hang is not None and band == num_bands - 1:
                    _waits(axes, timeline)
                last = rows is drawn[-1] and band == num_bands - 1
                _axis(axes, len(rows), unit, shown=num_bands > 1 or last, last=last)
            bottom -= _GAP_IN
        definitions = _OF_A_HANG if hangs else DEFINITIONS
        _legend(figure, [row for rows in drawn for row in rows], _MARGIN_LEFT_IN / width, definitions)
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, PNG or PDF; an existing file is overwritten."""
    with whole_file(path) as new, warnings.catch_warnings():
        # A title may have any character; what the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        # The same picture is the same bytes.
        dates: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(new, dpi=160, metadata=dates.get(path.suffix.lower()))
        if path.suffix.lower() == ".svg":
            # Black text names no colour, and white text lies on boxes alone.
            rules = [f"text:not([style*='fill:']) {{fill: {_DARK['#000000']}}}"]
            for light, dark in _DARK.items():
                inked = ":not(text)" if light == "#ffffff" else ""
                rules.append(f"{inked}[style*='fill: {light}'], [fill='{light}'] {{fill: {dark} !important}}")
                rules.append(f"[style*='stroke: {light}'] {{stroke: {dark} !important}}")
            dark_rules = "\n".join(["\n@media (prefers-color-scheme: dark) {", *rules, "}\n"])
            svg = new.read_text(encoding="utf-8")
            new.write_text(svg.replace("</style>", f"{dark_rules}</style>", 1), encoding="utf-8")


def _rows(axes: Axes, points_per_time: float, rows: tuple[Row, ...], makespan: float) -> None:
    quads: dict[str, list[list[tuple[float, float]]]] = {}
    fits = _font_size(rows, points_per_time)
    size = next((size for size in _FONT_SIZES if size <= fits), _FONT_SIZES[-1])
    for rank, row in enumerate(rows):
        quads.setdefault(Kind.IDLE.colour, []).append(_quad(0.0, makespan, rank, rank + 1))
        for box in sorted(row, key=lambda box: box.beside):
            step = 1 / len(box.parts)
            for index, part in enumerate(box.parts):
                upper, lower = rank + index * step, rank + (index + 1) * step
                if box.beside:
                    upper = lower - _BESIDE_HEIGHT
                else:
                    _label(axes, points_per_time, box, part, (upper + lower) / 2, size if step == 1 else 0.85 * size)
                quads.setdefault(part.colours[0], []).append(_quad(box.start, box.end, upper, lower))
    # Lines between boxes are fitted to the time that nine of ten boxes with a microbatch reach.
    lengths = sorted(box.end - box.start for row in rows for box in row if box.parts[0].microbatch >= 0)
    width = lengths[len(lengths) // 10] * points_per_time if lengths else 0.0
    line = 0.7 if width > 8 else 0.3 if width > 2.5 else 0.0
    for colour, corners in quads.items():
        edge = "white" if line and colour != Kind.IDLE.colour else "none"
        look: Any = {"facecolors": colour, "edgecolors": edge, "linewidths": line} | _hatch(colour)
        axes.add_collection(PolyCollection(corners, **look))


def _hatch(colour: str) -> dict[str, Any]:
    """The hatching of what waits for ever; empty for all other boxes."""
    if colour != Kind.WAIT.colour:
        return {}
    return {"hatch": "////", "edgecolor": "#E5AE93", "linewidth": 0.0}


def _waits(axes: Axes, timeline: Timeline) -> None:
    """Beside each rank of a hang its wait in words, and arrows of the cycle through the open ends of the blocks."""
    hang = timeline.hang
    assert hang is not None
    for rank in range(len(timeline.events)):
        text, colour = (hang.describe_wait(rank), Kind.WAIT.ink) if rank in hang.waits else ("ends", GREY)
        axes.text(
            1.01, rank + 0.5, text, transform=axes.get_yaxis_transform(), color=colour, fontsize=8, va="center_baseline"
        )
    room = (drawn_length(timeline) - timeline.makespan) / (len(hang.arrows) + 1)
    for number, (waiting, awaited) in enumerate(hang.arrows, start=1):
        x, style = timeline.makespan + number * room, {"arrowstyle": "-|>", "color": Kind.WAIT.ink, "linewidth": 1.6}
        ends = (x, awaited + 0.5), (x, waiting + 0.5)
        axes.annotate("", *ends, arrowprops=style | {"shrinkA": 0, "shrinkB": 0, "gid": f"arrow-{waiting}-{awaited}"})
        axes.plot(*ends[1], marker="o", markersize=4, color=Kind.WAIT.ink)


def _quad(start: float, end: float, upper: float, lower: float) -> list[tuple[float, float]]:
    """The corners of a box; rows are slightly lower than their distance."""
    inset = (1 - _ROW_HEIGHT) / 2
    upper = upper + inset if upper == int(upper) else upper
    lower = lower - inset if lower == int(lower) else lower
    return [(start, upper), (end, upper), (end, lower), (start, lower)]


def _font_size(rows: tuple[Row, ...], points_per_time: float) -> float:
    """The largest size at which nine of ten numbers fit, so that one picture has one size."""
    sizes = sorted(
        _size_in((box.end - box.start) * points_per_time, part.number)
        for row in rows
        for box in row
        for part in box.parts
        if part.microbatch >= 0
    )
    return sizes[len(sizes) // 10] if sizes else _FONT_SIZES[0]


def _size_in(points: float, text: str) -> float:
    """The font size at which a text is as wide as its box."""
    return points / (_EM_PER_FIGURE * len(text) + 0.2)


def _label(axes: Axes, points_per_time: float, box: Box, part: Part, y: float, size: float) -> None:
    """Write a box's label into as much of the box as the axes show, if it fits."""
    text = "" if part.kind is Kind.WAIT else part.number or part.kind.letter
    first, last = axes.get_xlim()
    start, end = max(box.start, first), min(box.end, last)
    if _size_in((end - start) * points_per_time, text) >= size:
        color = part.colours[1]
        axes.text((start + end) / 2, y, text, color=color, fontsize=size, ha="center", va="center_baseline")


def _heading(axes: Axes, size_in: tuple[float, float], timeline: Timeline, figures: str) -> None:
    """Title and figures above the rows, and each rank's own figures beside its row."""
    width_in, height_in = size_in
    inch = 1 / height_in
    idle_at, live_at = 1 + 0.55 / width_in, 1 + 1.0 / width_in

    def write(x: float, y: float, text: str, **style: Any) -> None:
        axes.text(x, 1 + y * inch, text, transform=axes.transAxes, **style)

    write(0, 0.30 + _LINE_IN * figures.count("\n"), timeline.title, fontsize=11, fontweight="bold")
    write(0, 0.10, figures, color=GREY)
    if timeline.hang is not None:
        return
    write(idle_at, 0.06, "idle", color=GREY, ha="right", fontsize=8)
    write(live_at, 0.06, "peak\nlive", color=GREY, ha="right", fontsize=8)
    row = height_in / len(timeline.events)
    for rank, (idle, live) in enumerate(zip(timeline.idle, timeline.peak_live_microbatches, strict=True)):
        share = idle / timeline.makespan if timeline.makespan else 0.0
        for x, text in ((idle_at, f"{share:.0%}"), (live_at, short_number(live))):
            write(x, -row * (rank + 0.5), text, ha="right", va="center", fontsize=8.5)


def _axis(axes: Axes, num_ranks: int, unit: str, *, shown: bool, last: bool) -> None:
    axes.set_ylim(num_ranks, 0)
    every = 1 if num_ranks <= 32 else 8
    axes.set_yticks([rank + 0.5 for rank in range(0, num_ranks, every)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(0, num_ranks, every)])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", color=GREY, labelcolor=GREY, labelsize=8, labelbottom=shown)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    _spines(axes, "bottom")
    if last:
        axes.set_xlabel(f"time, {unit}" if unit else "time", color=GREY, fontsize=8, loc="right", labelpad=1)


def _foot(figure: Figure, handles: list[Patch], left: float, bottom: float) -> None:
    """One line of colours and their words."""
    spacing = 1.3 if len(handles) < 8 else 0.8
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left, bottom), ncols=len(handles), frameon=False,
        handlelength=1.1, handleheight=1.0, columnspacing=spacing, borderaxespad=0.4, borderpad=0.2, fontsize=8.5,
    )  # fmt: skip


def _spines(axes: Axes, *shown: str) -> None:
    """Show these sides of the axes alone, in grey."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in shown)
        spine.set_color("#C5CAD1")


def _legend(figure: Figure, rows: Sequence[Row], left: float, definitions: Sequence[str]) -> None:
    """The colours, and below them the figures that are not plain from their names."""
    handles = [Patch(facecolor=kind.colour, label=kind.word, **_hatch(kind.colour)) for kind in kinds_in(rows)]
    parts = {part for row in rows for box in row for part in box.parts}
    later = [part for part in parts if part.local_stage > 0]
    if later:
        paler = min(later, key=lambda part: (part.local_stage, list(Kind).index(part.kind)))
        several = max(part.local_stage for part in later) > 1
        word = "paler: the rank's later stages" if several else "paler: the rank's second stage"
        handles.append(Patch(facecolor=paler.colours[0], label=word))
    if any(part.keeps for part in parts):
        handles.append(Patch(facecolor="none", label=WHAT_KEEPS))
    height = figure.get_size_inches()[1]
    _foot(figure, handles, left, 0.3 / height)
    figure.text(left, 0.08 / height, "\n".join(definitions), color=GREY, fontsize=7.5, va="bottom", linespacing=1.3)


_COLOURS = {
    MemoryKind.PARAMETERS: "#34506B",
    MemoryKind.GRADIENTS: "#5F86A8",
    MemoryKind.MASTERS: "#9DB8CE",
    MemoryKind.OPTIMIZER: "#C9D6E2",
    MemoryKind.OTHER: "#D9D9D9",
    MemoryKind.TAPE: "#2E8B57",
    MemoryKind.TRANSPORT: "#E0A030",
    MemoryKind.TRANSIENT: "#C8553D",
    MemoryKind.COMMUNICATORS: "#8A6FA8",
}
_MEMORY_WIDTHS_IN, _INCHES_PER_ACTION, _HEIGHT_IN = (9.0, 16.0), 0.16, 4.6
_MOST_NAMED = 64


def memory_picture(path: str | Path, rehearsal: Rehearsal) -> None:
    """Draw the memory of each action at its peak, kind upon kind, with a line at what remains after it.

    An existing file is overwritten.

    Raises: ValueError for an ending other than .svg, .png and .pdf.
    """
    path = Path(path)
    check_ending(path, PICTURES)
    points = rehearsal.timeline
    scale, unit = (2.0**30, "GiB") if rehearsal.peak_bytes >= 2**30 else (2.0**20, "MiB")
    kinds = [kind for kind in _COLOURS if rehearsal.most(kind)]
    width = min(max(_INCHES_PER_ACTION * len(points) + 1.5, _MEMORY_WIDTHS_IN[0]), _MEMORY_WIDTHS_IN[1])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, _HEIGHT_IN), facecolor="white")
        axes = figure.add_axes((0.75 / width, 0.24, 1 - 1.0 / width, 0.6))
        _memory_bars(axes, rehearsal, kinds, scale, unit)
        axes.set_xlim(0, len(points))
        axes.set_ylim(bottom=0)
        axes.margins(y=0.08)
        named = range(0, len(points), -(-len(points) // _MOST_NAMED))
        axes.set_xticks([i + 0.5 for i in named])
        axes.set_xticklabels([points[i].action for i in named], rotation=90, fontsize=6.5)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8))
        axes.set_ylabel(f"{unit}, at the peak of each action; the line: after it", color=GREY, fontsize=8)
        axes.tick_params(color=GREY, labelcolor=GREY)
        _spines(axes, "bottom", "left")
        title = f"rank {rehearsal.rank} ({rehearsal.place})"
        figure.text(0.75 / width, 0.935, title, fontsize=11, fontweight="bold")
        subtitle = f"{rehearsal.schedule}, {rehearsal.num_microbatches} microbatches, on {rehearsal.device}"
        figure.text(0.75 / width, 0.88, subtitle, color=GREY)
        _foot(figure, [Patch(facecolor=_COLOURS[kind], label=str(kind)) for kind in kinds], 0.75 / width, 0.0)
        save(figure, path)


def _memory_bars(axes: Axes, rehearsal: Rehearsal, kinds: list[MemoryKind], scale: float, unit: str) -> None:
    """Kind upon kind at each action's peak, what remains after it, and the fullest one."""
    points = rehearsal.timeline
    edges = list(range(len(points) + 1))
    below = [0.0] * len(points)
    for kind in kinds:
        top = [under + point.at_peak.get(kind, 0) / scale for under, point in zip(below, points, strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=_COLOURS[kind], linewidth=0)
        below = top
    remains = [sum(point.after.values()) / scale for point in points]
    axes.stairs(remains, edges, baseline=None, color="#1A1A1A", linewidth=0.8)
    place, peak = points.index(rehearsal.fullest), rehearsal.peak_bytes / scale
    axes.axhline(peak, color=GREY, linewidth=0.6, linestyle=(0, (4, 3)))
    axes.annotate(
        f"peak {peak:,.2f} {unit} in {rehearsal.fullest.action}",
        (place + 0.5, peak),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if place < len(points) / 2 else "right",
        fontsize=8.5,
    )
