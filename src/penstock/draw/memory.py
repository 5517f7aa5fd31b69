"""A rank's memory over a rehearsed step, action by action, and what it is made of, as SVG or PNG."""

from itertools import accumulate
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from penstock.draw.image import GREY, STYLE, check_path, save
from penstock.schedule.rehearsal import MemoryKind, MemoryPoint, Rehearsal

_COLOURS = {
    MemoryKind.PARAMETERS: "#34506B",
    MemoryKind.GRADIENTS: "#5F86A8",
    MemoryKind.MASTERS: "#9DB8CE",
    MemoryKind.OPTIMIZER: "#C9D6E2",
    MemoryKind.OTHER: "#D9D9D9",
    MemoryKind.TAPE: "#2E8B57",
    MemoryKind.TRANSPORT: "#E0A030",
    MemoryKind.TRANSIENT: "#C8553D",
}
_WIDTHS_IN, _INCHES_PER_ACTION, _HEIGHT_IN = (9.0, 16.0), 0.16, 4.6
_MOST_NAMED = 64


def memory_picture(path: str | Path, rehearsal: Rehearsal) -> None:
    """Draw the memory of each action at its peak, kind upon kind, with a line at what remains after it.

    An existing file is overwritten.

    Raises: ValueError for an ending other than .svg and .png.
    """
    path = Path(path)
    check_path(path)
    with matplotlib.rc_context(STYLE):
        save(_figure(rehearsal), path)


def _figure(rehearsal: Rehearsal) -> Figure:
    points = rehearsal.timeline
    width = min(max(_INCHES_PER_ACTION * len(points) + 1.5, _WIDTHS_IN[0]), _WIDTHS_IN[1])
    figure = Figure(figsize=(width, _HEIGHT_IN), facecolor="white")
    axes = figure.add_axes((0.75 / width, 0.24, 1 - 1.0 / width, 0.6))
    scale, unit = _unit(rehearsal.peak_bytes)
    kinds = [kind for kind in _COLOURS if rehearsal.most(kind)]
    _bars(axes, points, kinds, scale)
    _peak(axes, rehearsal, scale, unit)
    _axis(axes, points, unit)
    title = f"rank {rehearsal.rank} ({rehearsal.place})"
    figure.text(0.75 / width, 0.935, title, fontsize=11, fontweight="bold")
    subtitle = f"{rehearsal.schedule}, {rehearsal.num_microbatches} microbatches, on {rehearsal.device}"
    figure.text(0.75 / width, 0.88, subtitle, color=GREY)
    handles = [Patch(facecolor=_COLOURS[kind], label=str(kind)) for kind in kinds]
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.75 / width, 0.0), ncols=len(handles), frameon=False,
        handlelength=1.1, handleheight=1.0, columnspacing=1.3, borderaxespad=0.4, borderpad=0.2, fontsize=8.5,
    )  # fmt: skip
    return figure


def _bars(axes: Axes, points: tuple[MemoryPoint, ...], kinds: list[MemoryKind], scale: float) -> None:
    edges = list(range(len(points) + 1))
    columns = [[point.at_peak.get(kind, 0) / scale for point in points] for kind in kinds]
    tops = list(accumulate(columns, lambda below, own: [a + b for a, b in zip(below, own, strict=True)]))
    for i, (kind, top) in enumerate(zip(kinds, tops, strict=True)):
        bottom = tops[i - 1] if i else [0.0] * len(points)
        axes.stairs(top, edges, baseline=bottom, fill=True, color=_COLOURS[kind], linewidth=0)
    remains = [sum(point.after.values()) / scale for point in points]
    axes.stairs(remains, edges, baseline=None, color="#1A1A1A", linewidth=0.8)


def _peak(axes: Axes, rehearsal: Rehearsal, scale: float, unit: str) -> None:
    place, peak = rehearsal.timeline.index(rehearsal.fullest), rehearsal.peak_bytes / scale
    axes.axhline(peak, color=GREY, linewidth=0.6, linestyle=(0, (4, 3)))
    is_left = place < len(rehearsal.timeline) / 2
    axes.annotate(
        f"peak {peak:,.2f} {unit} in {rehearsal.fullest.action}",
        (place + 0.5, peak),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if is_left else "right",
        fontsize=8.5,
    )


def _axis(axes: Axes, points: tuple[MemoryPoint, ...], unit: str) -> None:
    axes.set_xlim(0, len(points))
    axes.set_ylim(bottom=0)
    axes.margins(y=0.08)
    every = -(-len(points) // _MOST_NAMED)
    named = range(0, len(points), every)
    axes.set_xticks([i + 0.5 for i in named])
    axes.set_xticklabels([points[i].action for i in named], rotation=90, fontsize=6.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8))
    axes.set_ylabel(f"{unit}, at the peak of each action; the line: after it", color=GREY, fontsize=8)
    axes.tick_params(color=GREY, labelcolor=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color("#C5CAD1")


def _unit(num_bytes: int) -> tuple[float, str]:
    return (2.0**30, "GiB") if num_bytes >= 2**30 else (2.0**20, "MiB")
