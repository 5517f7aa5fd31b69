"""A program that hangs is drawn up to there: what was carried out, the open blocks, and the arrows of the cycle."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.draw import picture
from penstock.draw.layers import KIND_OF, Kind
from penstock.draw.terminal import drawing
from penstock.schedule import Action, Program, parts, simulate
from penstock.schedule.actions import COMPUTE
from tests.schedule.hangs import HANGS, carried_out, hang_of, waiting

Shape = tuple[float, float, float, float, str]


def computed(program: Program, rank: int) -> list[tuple[Action, ...]]:
    """The compute steps that a plain interpreter carries out on a rank."""
    return [parts(step) for step in carried_out(program)[rank] if parts(step)[0].op in COMPUTE]


def words(program: Program) -> dict[int, str]:
    return {
        rank: f"{action} waits for {transfer} of rank {peer}"
        for rank, (action, transfer, peer) in waiting(program).items()
    }


def shapes(svg: str) -> list[Shape]:
    """Left, right, top, bottom and fill of every box."""
    number = r"(-?[\d.]+)"
    quad = rf'd="M {number} {number} \nL {number} {number} \nL {number} {number} \nL {number} {number} \nz\n"'
    quads = re.findall(rf'{quad} clip-path="[^"]*" style="fill: ([^;"]+)', svg)
    return [(float(q[0]), float(q[2]), float(q[1]), float(q[5]), q[8]) for q in quads]


@pytest.mark.shows(192)
@pytest.mark.parametrize("name", [name for name in HANGS if name != "after many actions"])
def test_the_picture_holds_what_is_carried_out_and_what_waits(name: str, tmp_path: Path):
    program, arrows = HANGS[name][0](), HANGS[name][1]
    hang = hang_of(program)
    assert hang is not None
    path = tmp_path / "hang.svg"
    picture(path, [simulate(hang)])
    svg = path.read_text()
    found = shapes(svg)
    rows = sorted({(top, bottom) for *_, top, bottom, fill in found if fill.lower() == Kind.IDLE.colour.lower()})
    assert len(rows) == len(program.ranks)
    labels = [(float(x), float(y), text) for x, y, text in re.findall(r' x="(\S+)" y="(\S+)"[^>]*>(\d+)</text>', svg)]
    edge = max(right for _, right, *_ in found)
    for rank, (top, bottom) in enumerate(rows):
        own = sorted(box for box in found if box[2] == top and box[3] == bottom)
        boxes = [box for box in own if box[4].lower() != Kind.IDLE.colour.lower()]
        blocks = [box for box in boxes if box[4].startswith("url(")]
        steps = computed(program, rank)
        local = program.placement.stages_of(rank)
        assert len(boxes) - len(blocks) == len(steps)
        for (action,), box in zip(steps, boxes):
            numbers = [text for x, y, text in labels if box[0] < x < box[1] and box[2] < y < box[3]]
            assert numbers == [str(action.microbatch)]
            plain = local.index(action.stage) == 0
            assert not plain or box[4].lower() == KIND_OF[action.op].colour.lower()
        # The open block begins behind the last box, and only what waits has one.
        assert len(blocks) == (rank in waiting(program))
        assert all(block[1] == edge and block[0] == (boxes[-2][1] if steps else own[0][0]) for block in blocks)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert sorted(text for text in texts if " waits for " in text and " of rank " in text) == sorted(
        words(program).values()
    )
    assert " ".join(hang.sentence.split()[:8]) in " ".join(texts)
    ends = re.findall(r'<g id="arrow-(\d+)-(\d+)">\s*<path d="M [\d.]+ ([\d.]+) \nQ [\d. ]+ ([\d.]+) \n"', svg)
    row_of = {
        rank: lambda y, top=top, bottom=bottom: top <= float(y) <= bottom for rank, (top, bottom) in enumerate(rows)
    }
    assert {(int(a), int(b)) for a, b, *_ in ends} == arrows and len(ends) == len(arrows)
    assert all(row_of[int(a)](start) and row_of[int(b)](end) for a, b, start, end in ends)


@pytest.mark.shows(192)
@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("name", HANGS)
def test_the_terminal_has_a_line_for_each_rank_that_waits(name: str, coloured: bool):
    program, arrows = HANGS[name][0](), HANGS[name][1]
    hang = hang_of(program)
    assert hang is not None
    lines = [line.plain for line in drawing(simulate(hang), coloured=coloured)]
    rows = [line for line in lines if line.startswith("rank ") and "waits for" not in line]
    for rank in range(len(program.ranks)):
        own = [line.removeprefix(f"rank {rank} ") for line in rows if line.startswith(f"rank {rank} ")]
        marks = [mark for line in own for mark in re.findall(r"[FBIW](\d+)", line.upper())]
        assert marks == [str(action.microbatch) for step in computed(program, rank) for action in step]
        assert own[-1].endswith("/" if rank in waiting(program) else "·")
        told = [line for line in lines if line.startswith(f"rank {rank} ") and "waits for" in line]
        assert told == ([f"rank {rank} {words(program)[rank]}"] if rank in waiting(program) else [])
    ring = [int(rank) for rank in re.findall(r"rank (\d+)", lines[-1])]
    assert set(pairwise(ring)) == arrows and " → " in lines[-1]
    assert not any("bubble" in line or "makespan" in line for line in lines)


@pytest.mark.parametrize("width", [20, 80])
def test_a_hang_fits_any_terminal(width: int):
    for make, _ in HANGS.values():
        hang = hang_of(make())
        assert hang is not None and all(line.cell_len <= width for line in drawing(simulate(hang), width=width))


def test_a_long_program_that_hangs_has_its_open_blocks_in_the_last_band(tmp_path: Path):
    hang = hang_of(HANGS["after many actions"][0]())
    assert hang is not None
    picture(tmp_path / "hang.svg", [simulate(hang)])
    svg = (tmp_path / "hang.svg").read_text()
    assert svg.count('<g id="arrow-') == 2 and len(re.findall(r" waits for \S+ of rank ", svg)) == len(hang.waits)
    picture(tmp_path / "hang.png", [simulate(hang)])
