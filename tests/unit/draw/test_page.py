"""The page's file: it holds the timeline exactly, and nothing that would need or could break the rest."""

import json
import re
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock import schedule
from penstock.draw.layers import Layer
from penstock.draw.page import write_page
from penstock.schedule import Action, Costs, Event, Op, Pair, Timeline
from penstock.schedule.text import parse_step

COSTS = Costs(forward=29.718, backward_input=29.444, backward_weight=19.927, transfer=0.527, reduce=3.3, step=2.2)

FUSED = Timeline.from_events(
    [
        [
            Event(Action(Op.F, 0, 0), 0.0, 1.0),
            Event(Pair(Action(Op.F, 1, 1), Action(Op.B, 0, 0)), 1.0, 4.0),
            Event(Pair(Action(Op.F, 0, 2), Action(Op.I, 1, 1)), 4.0, 5.0),
            Event(Action(Op.W, 1, 1), 6.0, 7.0),
            Event(Action(Op.B, 0, 2), 7.0, 8.0),
        ]
    ],
    stages_per_rank=2,
    title="fused pairs",
)


def data_of(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def decode(lane: dict[str, Any], tick: float) -> list[tuple[str, float, float]]:
    """The actions of a lane as text, start and end."""
    decoded, now, pairs = [], 0, iter(lane["pairs"])
    for kind, stage, microbatch, gap, took in zip(
        lane["kinds"], lane["stage"], lane["microbatch"], lane["gap"], lane["took"], strict=True
    ):
        start, now = now + gap, now + gap + took
        text = {"G": f"{stage}REDUCE_GRAD", "S": "STEP"}.get(kind, f"{stage}{kind}{microbatch}")
        if kind in "PQ":
            text = f"({stage}F{microbatch};{next(pairs)}{'B' if kind == 'P' else 'I'}{next(pairs)})OVERLAP_F_B"
        decoded.append((text, start * tick, now * tick))
    assert next(pairs, None) is None
    return decoded


def timelines() -> list[Timeline]:
    grid = product(("afab", "1f1b", "inference"), (1, 3), (1, 5))
    built = [schedule.build(name, ranks=ranks, microbatches=microbatches) for name, ranks, microbatches in grid]
    moved = schedule.build("1f1b", ranks=2, microbatches=2)
    order = [parse_step(word) for word in ["0F0", "0O0", "0F1", "0L0", "0B0", "0R1", "0B1"]]
    built.append(replace(moved, orders=(tuple(order), moved.orders[1])))
    return [schedule.simulate(schedule.lower(one), COSTS) for one in built] + [FUSED]


@pytest.mark.parametrize("timeline", timelines(), ids=lambda timeline: timeline.title)
def test_the_page_holds_every_event_to_nine_digits(timeline: Timeline, tmp_path: Path):
    write_page(tmp_path / "page.html", [Layer.simulated(timeline)])
    (layer,) = data_of(tmp_path / "page.html")["layers"]
    assert layer["makespan"] == timeline.makespan
    for rank, events in zip(layer["ranks"], timeline.events, strict=True):
        decoded = decode(rank["compute"], layer["tick"]) + decode(rank["beside"], layer["tick"])
        assert sorted(text for text, _, _ in decoded) == sorted(str(event.action) for event in events)
        times = {text: (start, end) for text, start, end in decoded}
        for event in events:
            assert times[str(event.action)] == pytest.approx((event.start, event.end), abs=1e-8 * timeline.makespan)


def test_nothing_in_a_title_or_command_is_taken_for_markup(tmp_path: Path):
    nasty = "</script><img src=x onerror=alert(1)> $title & \"quotes\" 'too'"
    event = [[Event(Action(Op.F, 0, 0), 0.0, 1.0)]]
    write_page(tmp_path / "page.html", [Layer.simulated(Timeline.from_events(event, title=nasty))], command=nasty)
    page = (tmp_path / "page.html").read_text()
    assert data_of(tmp_path / "page.html")["layers"][0]["title"] == nasty
    assert "<img" not in page
    (heading,) = re.findall(r'<h1 id="title">(.*?)</h1>', page)
    assert unescape(heading) == nasty
    assert page.count("</script>") == page.count("<script") == 2


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path):
    write_page(tmp_path / "page.html", [Layer.simulated(FUSED)])
    page = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)


@pytest.mark.parametrize("timeline", timelines(), ids=lambda timeline: timeline.title)
def test_what_is_live_is_told_over_time(timeline: Timeline, tmp_path: Path):
    with_bytes = replace(timeline, costs=Costs(microbatch_bytes=3e9))
    for layer, unit in ((Layer.simulated(timeline), 1), (Layer.simulated(with_bytes), 3e9)):
        write_page(tmp_path / "page.html", [layer])
        data = data_of(tmp_path / "page.html")
        assert data["inBytes"] == (unit > 1)
        (told,) = data["layers"]
        for rank, peak in zip(told["ranks"], timeline.peak_live_microbatches, strict=True):
            live = rank["live"]
            assert max(live["value"]) == pytest.approx(peak * unit, rel=1e-5)
            assert live["value"][-1] == pytest.approx(0, abs=1e-5 * unit)
            assert min(live["gap"]) >= 0
            assert sum(live["gap"]) * told["tick"] <= timeline.makespan * (1 + 1e-8)
