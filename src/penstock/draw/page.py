"""Timelines as one self-contained HTML page: to zoom in, to follow a microbatch, to compare two timelines.

The page consists of the files in `assets`: a skeleton, a style sheet and scripts. The timelines are embedded as JSON in
columns, with times as whole numbers of a tick, so that a page of a million actions is still small enough to send.
"""

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import chain, pairwise
from math import floor, log10
from pathlib import Path
from string import Template
from typing import Any

from penstock.draw.layers import (
    DEFINITIONS,
    KIND_OF,
    Kind,
    Layer,
    bytes_are_known,
    check_layers,
    drawn_length,
    runs_beside,
    waits_for_ever,
)
from penstock.io.files import whole_file
from penstock.schedule import Event, Op, Pair
from penstock.schedule.actions import parts
from penstock.schedule.recording import Wait

_SCRIPTS = ("model.js", "paint.js", "view.js", "hang.js", "tell.js", "page.js")
_DIGITS = 9  # of the makespan, in a tick
_PAIRS = {Op.B: "P", Op.I: "Q"}

# Another colour of the same hue where that of the printed pictures is too dark for a dark page.
_DARK = {Kind.FORWARD: "#5C9CE6", Kind.STEP: "#A3ADB9", Kind.IDLE: "#222933", Kind.WAIT: "#3A2A22"}


def write_page(path: str | Path, layers: Sequence[Layer], *, unit: str = "", command: str = "") -> None:
    """Draw timelines into an HTML file; an existing file is overwritten.

    `unit` is that of the timelines' times, `command` the one that made the page. Below each rank are its live
    microbatches over time, or their bytes if all timelines know them.

    Raises: ValueError for layers that cannot be drawn together.
    """
    check_layers(layers)
    in_bytes = bytes_are_known(layers)
    content = {
        "unit": unit,
        "command": command,
        "inBytes": in_bytes,
        "looks": {
            kind.letter: dict(
                zip(("letter", "word", "colour", "ink", "dark"), (*kind.value, _DARK.get(kind)), strict=True)
            )
            for kind in Kind
        },
        "layers": [_layer(layer, in_bytes) for layer in layers],
    }
    assets = resources.files("penstock.draw") / "assets"
    *others, last = layers
    # In the data nothing can end the script element that holds it.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(", and ".join([last.timeline.title, *(layer.name for layer in others)])),
        command=html.escape(command),
        definitions=html.escape("; ".join(DEFINITIONS)),
        style=(assets / "page.css").read_text(encoding="utf-8"),
        data=data,
        script="\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    )
    with whole_file(path) as new:
        new.write_text(page, encoding="utf-8")


def _layer(layer: Layer, in_bytes: bool) -> dict[str, Any]:
    timeline, hang = layer.timeline, layer.timeline.hang
    # A power of ten, so that round times stay round.
    length = drawn_length(timeline)
    tick = 10.0 ** (floor(log10(length)) + 1 - _DIGITS) if length > 0 else 1.0
    waits = layer.waits or ((),) * len(timeline.events)
    live = timeline.live_bytes if in_bytes else timeline.live_microbatches
    return {
        "name": layer.name,
        "title": timeline.title,
        "tick": tick,
        "makespan": length,
        "span": timeline.span_cost,
        "bubble": timeline.bubble_rate,
        "idle": timeline.idle,
        "idleShare": timeline.idle_share,
        "peak": timeline.peak_live_microbatches,
        "recorded": bool(layer.waits),
        "hang": hang
        and {
            "sentence": hang.sentence,
            "carriedOut": timeline.makespan,
            "waits": [
                {"rank": rank, "awaited": wait.rank, "start": wait.start, "told": hang.describe_wait(rank)}
                for rank, own in enumerate(waits_for_ever(timeline))
                for wait in own
            ],
            "arrows": hang.arrows,
        },
        "ranks": [
            _rank(events, own, tick) | {"live": _live(live(rank), tick)}
            for rank, (events, own) in enumerate(zip(timeline.events, waits, strict=True))
        ],
    }


def _rank(events: Sequence[Event], waits: Sequence[Wait], tick: float) -> dict[str, Any]:
    """A rank's lanes: its compute, what runs beside that, and its waits."""
    compute, beside = [], []
    for event in events:
        (beside if runs_beside(event.action) else compute).append(event)
    return {
        "compute": _lane(compute, tick),
        "beside": _lane(sorted(beside, key=lambda event: event.start), tick),
        "waits": _times(((wait.start, wait.end) for wait in waits), tick) | {"rank": [wait.rank for wait in waits]},
    }


def _lane(events: Sequence[Event], tick: float) -> dict[str, Any]:
    """Events as columns: a letter each (a fused pair of F with B is P, with I is Q), stage, microbatch and times.

    `pairs` has stage and microbatch of the backwards in fused pairs, one after the other, `kept` the places of forwards
    that keep all activations.
    """
    first = [parts(event.action)[0] for event in events]
    backwards = [event.action.backward for event in events if isinstance(event.action, Pair)]
    letters = (
        _PAIRS[event.action.backward.op] if isinstance(event.action, Pair) else KIND_OF[event.action.op].letter
        for event in events
    )
    return {
        "kinds": "".join(letters),
        "stage": [action.stage for action in first],
        "microbatch": [action.microbatch for action in first],
        "kept": [place for place, action in enumerate(first) if action.keeps],
        "pairs": list(chain.from_iterable((action.stage, action.microbatch) for action in backwards)),
        **_times(((event.start, event.end) for event in events), tick),
    }


def _live(changes: Sequence[tuple[float, float]], tick: float) -> dict[str, list[float]]:
    """Columns of the times since the previous change, in ticks, and of the amounts live from then on."""
    ticks = [round(time / tick) for time, _ in changes]
    return {
        "gap": [after - before for before, after in pairwise([0, *ticks])],
        # Shares of a microbatch need not be exact to the last bit.
        "value": [int(live) if live == int(live) else float(f"{live:.6g}") for _, live in changes],
    }


def _times(stretches: Iterable[tuple[float, float]], tick: float) -> dict[str, list[int]]:
    """Spans in ticks: `gap` from the end of the previous one, and `took`; most gaps are 0."""
    gaps, took, before = [], [], 0
    for start, end in stretches:
        first, last = round(start / tick), round(end / tick)
        gaps.append(first - before)
        took.append(last - first)
        before = last
    return {"gap": gaps, "took": took}
