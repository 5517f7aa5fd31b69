"""Drawings say what the timeline says, and fit where they are put."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest

from penstock import schedule
from penstock.draw import picture
from penstock.draw.layers import boxes_of, idle_spans, one_at_a_time
from penstock.draw.terminal import drawing
from penstock.schedule import Action, Costs, Event, Op, Pair, Timeline
from penstock.schedule.actions import flatten, keepers


@cache
def timeline_of(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches))
    return schedule.simulate(program, costs)


FUSED = Timeline.from_events(
    [
        [
            Event(Action(Op.F, 0, 0), 0.0, 1.0),
            Event(Pair(Action(Op.F, 1, 1), Action(Op.B, 0, 0)), 1.0, 4.0),
            Event(Action(Op.I, 1, 1), 5.0, 6.0),
            Event(Action(Op.W, 1, 1), 6.0, 7.0),
        ]
    ],
    stages_per_rank=2,
    title="a fused pair",
)


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("width", [20, 80, 133])
def test_every_line_fits_and_every_rank_has_a_row(width: int, coloured: bool):
    for name, ranks, microbatches in product(schedule.names(), (1, 2, 8), (1, 3, 64)):
        lines = drawing(timeline_of(name, ranks, microbatches), width=width, coloured=coloured)
        assert all(line.cell_len <= width for line in lines) and len(lines) <= 310
        rows = [line for line in lines if line.plain.startswith("rank ")]
        num_bands = len(rows) // ranks
        assert [int(row.plain.split()[1][0]) for row in rows] == [*range(ranks)] * num_bands and num_bands >= 1
        ends = [{row.cell_len for row in rows[band * ranks : (band + 1) * ranks]} for band in range(num_bands)]
        # A label that the end of a band would cut stands in the next.
        assert all(max(own) - min(own) < 5 for own in ends) and min(map(min, ends)) > width / 2


@pytest.mark.parametrize("coloured", [False, True])
def test_each_action_is_named_once_where_there_is_room(coloured: bool):
    for ranks, microbatches in ((1, 8), (3, 4), (4, 8)):
        rows = [line.plain for line in drawing(timeline_of("1f1b", ranks, microbatches), coloured=coloured)]
        for row in rows[1 : 1 + ranks]:
            marks = re.findall(r"[FB]\d", row)
            assert sorted(marks) == sorted(f"{op}{microbatch}" for op in "FB" for microbatch in range(microbatches))


NAME = re.compile("([FBIW])([⁰¹²³⁴⁵⁶⁷⁸⁹]*)([0-9]+)", re.IGNORECASE)
DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")


def read(lines: list[str], rank: int) -> list[tuple[str, int, int]]:
    """The kind, local stage and microbatch of each action that a rank's lines name, each line by itself."""
    found = [name for line in lines if line.startswith(f"rank {rank} ") for name in NAME.findall(line[6:])]
    return [
        (letter.upper(), 0 if letter.isupper() else int(stage.translate(DIGITS) or 2) - 1, int(microbatch))
        for letter, stage, microbatch in found
    ]


@pytest.mark.parametrize(
    "name, ranks, microbatches, stages",
    [
        ("1f1b", 4, 8, 1),
        ("1f1b", 8, 32, 1),
        ("1f1b", 2, 101, 1),
        ("afab", 1, 1, 1),
        ("interleaved", 8, 32, 2),
        ("interleaved", 4, 12, 3),
        ("interleaved", 8, 32, 4),
        ("zb-h1", 5, 40, 1),
        ("zb-v", 8, 32, 2),
        ("dualpipe", 8, 32, 2),
        ("dualpipe-v", 8, 32, 2),
    ],
)
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.3, 0.8, transfer=0.2)])
def test_every_action_can_be_read_in_eighty_columns(
    name: str, ranks: int, microbatches: int, stages: int, costs: Costs
):
    program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages))
    timeline = schedule.simulate(program, costs)
    lines = [line.plain for line in drawing(timeline)]
    assert max(map(len, lines)) <= 80
    for rank, order in enumerate(program.schedule.orders):
        local = program.placement.stages_of(rank)
        wanted = [(action.op.name, local.index(action.stage), action.microbatch) for action in flatten(order)]
        assert read(lines, rank) == wanted and wanted
    text = "\n".join(lines)
    assert ("small letter: the rank's second stage" in text) == (stages > 1)
    assert ("(f³: its third)" in text) == (stages > 2)
    assert ("F+B a fused pair" in text) == (name in ("dualpipe", "dualpipe-v"))
    times = [float(time) for line in lines if set(line) <= set("0123456789. ") for time in line.split()]
    assert times[0] == 0 and times == sorted(set(times)) and times[-1] > 0.8 * timeline.makespan


def test_colour_adds_no_words_and_takes_none():
    for name in ("zb-v", "dualpipe"):
        plain, coloured = (
            [line.plain for line in drawing(timeline_of(name, 4, 12), coloured=coloured) if "rank " in line.plain[:5]]
            for coloured in (False, True)
        )
        assert plain and [line.replace("─", " ") for line in plain] == coloured


def test_columns_are_time():
    timeline = timeline_of("afab", 4, 8)
    per_unit = 2
    rows = [line.plain.removeprefix(f"rank {rank} ") for rank, line in enumerate(drawing(timeline)[1:5])]
    for row, boxes in zip(rows, boxes_of(timeline), strict=True):
        assert len(row) == timeline.makespan * per_unit
        for start, end in idle_spans(boxes, timeline.makespan):
            assert set(row[round(start * per_unit) : round(end * per_unit)]) == {"·"}
        assert row.count("·") == sum(end - start for start, end in idle_spans(boxes, timeline.makespan)) * per_unit


def test_what_runs_beside_compute_is_kept_only_where_the_rank_would_be_idle():
    for ranks, microbatches, reduce in product((1, 3), (1, 5), (0.5, 7.0)):
        for row in boxes_of(timeline_of("1f1b", ranks, microbatches, Costs(reduce=reduce, step=0.25))):
            flat = one_at_a_time(row)
            assert all(before.end <= after.start for before, after in pairwise(flat))
            assert {box for box in row if not box.beside} <= set(flat)


def test_a_fused_pair_is_one_box_of_two_parts():
    (row,) = boxes_of(FUSED)
    assert [len(box.parts) for box in row] == [1, 2, 1, 1]
    assert [(part.kind.name, part.local_stage, part.microbatch) for part in row[1].parts] == [
        ("FORWARD", 1, 1),
        ("BACKWARD", 0, 0),
    ]


def texts_of(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def test_a_picture_bears_every_microbatch_and_its_figures(tmp_path: Path):
    timeline = timeline_of("1f1b", 3, 7)
    picture(tmp_path / "a.svg", [timeline])
    texts = texts_of(tmp_path / "a.svg")
    assert timeline.title in texts
    assert any("bubble" in text and f"{timeline.bubble_rate:.2%}" in text for text in texts)
    for microbatch in (4, 6):  # figures that neither the axis nor the margins show
        assert texts.count(str(microbatch)) >= 2 * 3
    assert {"forward", "backward", "idle"} <= set(texts)
    assert "optimizer step" not in texts


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_every_number_can_be_read_at_eight_ranks_and_32_microbatches(name: str, tmp_path: Path):
    timeline = timeline_of(name, 8, 32)
    picture(tmp_path / "a.svg", [timeline])
    written = re.findall(r'<text style="font-size: ([\d.]+)px[^>]*>(\d+)</text>', (tmp_path / "a.svg").read_text())
    sizes = [float(size) for size, text in written if int(text) > 9]
    parts = [part for row in boxes_of(timeline) for box in row for part in box.parts if part.microbatch > 9]
    # Ticks of the axis are numbers too.
    assert len(sizes) >= len(parts) and min(sizes) >= 6


@pytest.mark.parametrize("stages, words", [(1, None), (2, "paler: the rank's second stage"), (3, "later stages")])
def test_shades_and_figures_are_explained(stages: int, words: str | None, tmp_path: Path):
    name = "1f1b" if stages == 1 else "interleaved"
    program = schedule.lower(schedule.build(name, ranks=2, microbatches=4, stages_per_rank=stages))
    picture(tmp_path / "a.svg", [schedule.simulate(program)])
    text = (tmp_path / "a.svg").read_text()
    assert ("paler" in text) == (words is not None) and (
        words is None or words.replace("'", "&#x27;") in text or words in text
    )
    for figure in (
        "idle: share of the makespan",
        "span: the longest time",
        "bubble: share of the span that the busiest rank does not compute",
    ):
        assert figure in text


def test_the_idle_share_of_all_ranks_stands_beside_a_measured_bubble(tmp_path: Path):
    """One rank computes for nine, then the other for one: no bubble, but half of all time is idle."""
    events = [[Event(Action(Op.F, 0, 0), 0.0, 9.0)], [Event(Action(Op.F, 1, 0), 9.0, 10.0)]]
    simulated = Timeline.from_events(events)
    measured = replace(simulated, measured=True)
    assert measured.idle_share == sum(measured.idle) / 20 == 0.5
    for timeline in (simulated, measured):
        picture(tmp_path / "a.svg", [timeline])
        texts = [text for text in texts_of(tmp_path / "a.svg") if "bubble 0.00%" in text]
        lines = [line.plain for line in drawing(timeline) if "bubble 0.00%" in line.plain]
        assert len(texts) == len(lines) == 1
        assert [("idle of all ranks 50.00%" in text) for text in (*texts, *lines)] == [timeline.measured] * 2


@pytest.mark.shows(188)
def test_a_forward_that_keeps_all_activations_bears_its_mark_and_the_key_says_so(tmp_path: Path):
    for name in ("1f1b", "combined-1f1b"):
        plain = schedule.lower(schedule.build(name, ranks=2, microbatches=4))
        program = schedule.keep_first(plain, 1)
        svg, lines = tmp_path / "mine.svg", [line.plain for line in drawing(schedule.simulate(program), width=200)]
        picture(svg, [schedule.simulate(program)])
        for rank, order in enumerate(program.schedule.orders):
            row = next(line for line in lines if line.startswith(f"rank {rank}"))
            for action in flatten(order):
                assert (f"F{action.microbatch}K" in row) >= action.keeps
            assert row.count("K") == len(keepers(order)) > 0
        drawn = svg.read_text()
        assert drawn.count("K</text>") == sum(len(keepers(order)) for order in program.schedule.orders)
        for shown in ("\n".join(lines), drawn):
            assert "K: keeps all activations, recomputes none" in shown
        picture(svg, [schedule.simulate(plain)])
        assert "keeps all" not in svg.read_text()
