"""`schedule compare --units`: schedules of different numbers of stages on one model, each with a cut of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock import schedule
from penstock.cli.main import main

UNITS = (1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 11.0)
NAMES = ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "auto"]
STAGES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe": 2, "auto": 1}


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert main(["schedule", "compare", "--json", *arguments]) == 0
    return {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.shows(110)
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_schedule_cuts_the_units_itself(capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    units = ",".join(map(str, UNITS))
    found = compared(capsys, "--ranks", str(ranks), "--microbatches", "8", "--units", units, "--schedules", *NAMES)
    assert {name: row["stages_per_rank"] for name, row in found.items()} == STAGES
    for name in ("1f1b", "interleaved", "zb-v", "dualpipe"):
        program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=8))
        cut = schedule.balanced_cut(UNITS, program.placement)
        times = [sum(UNITS[unit] for unit in units) * ranks / sum(UNITS) for units in cut]
        assert len(set(times)) > 1, "the stages are unequal"
        timeline = schedule.simulate(program, schedule.Costs(times, times, times))
        assert found[name]["makespan"] == pytest.approx(timeline.makespan, rel=1e-12)
    assert found["auto"]["makespan"] <= found["1f1b"]["makespan"]


@pytest.mark.shows(110)
def test_more_stages_than_units_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, "--ranks", "4", "--microbatches", "8", "--units", "1,2,3,4,5", "--schedules", *NAMES)
    assert set(found) == {"1f1b", "zb-h1", "dualpipe", "auto"}


def test_even_units_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plain = compared(capsys, "--ranks", "2", "--microbatches", "4", "--schedules", "1f1b", "zb-v")
    even = compared(capsys, "--ranks", "2", "--microbatches", "4", "--units", "3,3,3,3", "--schedules", "1f1b", "zb-v")
    assert even == plain


def test_stage_times_beside_units_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "compare", "--ranks", "2", "--units", "1,2,3", "--forward", "1,2"]) == 2
    assert "--forward gives each stage its own" in capsys.readouterr().err


@pytest.mark.shows(110)
def test_times_of_other_numbers_of_stages_lead_to_units(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "2", "--microbatches", "4", "--forward", "1,2,1,2", "--schedules"]
    assert main(["schedule", "compare", *words, "interleaved"]) == 0
    assert main(["schedule", "compare", *words, "interleaved", "1f1b"]) == 2
    assert "1f1b has 2 stages, and 4 times are given; " in (said := capsys.readouterr().err) and "--units" in said
