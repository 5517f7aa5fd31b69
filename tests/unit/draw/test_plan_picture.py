"""The picture of a plan: everything that was tried is in it, and its frontier is right."""

from pathlib import Path

import pytest

from penstock.draw.image import PlannedLayout, frontier, plan_picture

GIB = 2**30


def layout(label: str, tokens: float, gib: float) -> PlannedLayout:
    return PlannedLayout(label, tokens, gib * GIB, {"compute": 1.0, "bubble": 0.25, "tp": 0.125})


TRIED = [
    layout("dp4", 90.0, 60.0),
    layout("dp2 tp2", 80.0, 30.0),
    layout("pp4", 100.0, 70.0),
    layout("pp2 dp2", 70.0, 40.0),
    layout("alone", 120.0, 95.0),
]


def test_the_frontier_is_what_no_other_layout_beats_in_memory_and_throughput():
    assert [one.label for one in frontier(TRIED)] == ["dp2 tp2", "dp4", "pp4", "alone"]
    assert frontier([]) == []


def test_layouts_parts_and_the_devices_memory_are_drawn(tmp_path: Path):
    path = tmp_path / "plan.svg"
    plan_picture(path, "4 devices", TRIED[:3], TRIED, 80 * GIB)
    drawn = path.read_text()
    for text in ("4 devices", "fits (4)", "too big (1)", "frontier", "memory", "dp2 tp2  2", "bubble", "waits for tp"):
        assert text in drawn, text
    again = tmp_path / "again.svg"
    plan_picture(again, "4 devices", TRIED[:3], TRIED, 80 * GIB)
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match=r"\.svg"):
        plan_picture(tmp_path / "plan.gif", "4 devices", TRIED[:1], TRIED, 80 * GIB)
