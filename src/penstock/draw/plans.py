"""All layouts that a plan tried, as throughput over memory, and what the steps of the best are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.draw.image import GREY, STYLE, check_path, save

# In this order, from the left of each bar; waits bear the name of the axis whose messages they wait for.
_PARTS = {
    "compute": ("#34506B", "compute"),
    "bubble": ("#D9D9D9", "bubble"),
    "tp": ("#C8553D", "waits for tp"),
    "cp": ("#E0A030", "waits for cp"),
    "ep": ("#8B5FA8", "waits for ep"),
    "dp": ("#B0703C", "waits for dp"),
    "gradients and optimizer": ("#2E8B57", "gradients and optimizer"),
}
_FITS, _TOO_BIG, _FRONTIER = "#5F86A8", "#C9CED4", "#1A1A1A"
_GIB = 2.0**30
_SIZE_IN = (12.5, 5.6)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that was tried: tokens a second and device, bytes of its fullest rank, seconds of its step by part."""

    label: str
    tokens_s_device: float
    peak_bytes: float
    parts_s: Mapping[str, float]


def plan_picture(
    path: str | Path,
    title: str,
    best: Sequence[PlannedLayout],
    tried: Sequence[PlannedLayout],
    memory_bytes: float,
) -> None:
    """Draw all layouts that were tried, and the steps of the `best`; `memory_bytes` are those of a device.

    An existing file is overwritten.

    Raises: ValueError for an ending other than .svg and .png.
    """
    path = Path(path)
    check_path(path)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE_IN, facecolor="white")
        figure.text(0.055, 0.94, title, fontsize=11, fontweight="bold")
        _scatter(figure.add_axes((0.055, 0.12, 0.31, 0.76)), best, tried, memory_bytes)
        _bars(figure.add_axes((0.69, 0.2, 0.29, 0.68)), best)
        save(figure, path)


def frontier(layouts: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """The layouts that no other one beats in both memory and throughput, by increasing memory."""
    found: list[PlannedLayout] = []
    for one in sorted(layouts, key=lambda one: (one.peak_bytes, -one.tokens_s_device)):
        if not found or one.tokens_s_device > found[-1].tokens_s_device:
            found.append(one)
    return found


def _scatter(axes: Axes, best: Sequence[PlannedLayout], tried: Sequence[PlannedLayout], memory_bytes: float) -> None:
    fitting = [one for one in tried if one.peak_bytes <= memory_bytes]
    too_big = [one for one in tried if one.peak_bytes > memory_bytes]
    for layouts, colour, word in ((too_big, _TOO_BIG, "too big"), (fitting, _FITS, "fits")):
        if layouts:
            axes.scatter(*_points(layouts), s=12, color=colour, linewidth=0, label=f"{word} ({len(layouts)})")
    edge = frontier(tried)
    axes.step(*_points(edge), where="post", color=_FRONTIER, linewidth=0.9, label="frontier")
    axes.scatter(*_points(edge), s=14, facecolor="white", edgecolor=_FRONTIER, linewidth=0.9, zorder=3)
    if best:
        place = best[0].peak_bytes / _GIB, best[0].tokens_s_device
        axes.annotate("1", place, xytext=(0, 7), textcoords="offset points", ha="center", fontweight="bold")
    low, high = axes.get_xlim()
    if low <= memory_bytes / _GIB <= 1.5 * high:
        axes.axvline(memory_bytes / _GIB, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), label="a device's memory")
    axes.set_ylim(bottom=0, top=1.12 * max(one.tokens_s_device for one in tried))
    axes.set_xlim(left=0)
    axes.set_xlabel("GiB on the fullest rank", color=GREY)
    axes.set_ylabel("tokens a second and device", color=GREY)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="lower left", frameon=False, fontsize=8)
    _quiet(axes)


def _points(layouts: Sequence[PlannedLayout]) -> tuple[list[float], list[float]]:
    return [one.peak_bytes / _GIB for one in layouts], [one.tokens_s_device for one in layouts]


def _bars(axes: Axes, best: Sequence[PlannedLayout]) -> None:
    parts = [part for part in _PARTS if any(one.parts_s.get(part) for one in best)]
    lefts = [0.0] * len(best)
    for part in parts:
        widths = [one.parts_s.get(part, 0.0) for one in best]
        colour, label = _PARTS[part]
        axes.barh(range(len(best)), widths, left=lefts, height=0.72, color=colour, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(range(len(best)), [f"{one.label}  {i}" for i, one in enumerate(best, start=1)], fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, on its busiest rank", color=GREY)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.55, -0.13), ncols=7, frameon=False, fontsize=8, handlelength=1.1)
    _quiet(axes)
    axes.tick_params(axis="y", length=0, labelcolor="#1A1A1A")


def _quiet(axes: Axes) -> None:
    axes.tick_params(color=GREY, labelcolor=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color("#C5CAD1")
