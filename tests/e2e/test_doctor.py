"""`penstock doctor`, and the groups that a dry run prints: what the layout says, and links that carry."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.settings import Layout
from tests.e2e.training import result_of, run, write_run


def test_the_groups_of_a_layout_are_printed_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--pp", "2", "--dp", "2", "--tp", "2", "--ep", "2", "--no-links", "--json"]) == 0
    told, layout = json.loads(capsys.readouterr().out), Layout(pp=2, dp=2, tp=2, ep=2)
    assert told["links"] is None
    expected = {
        "pipelines (pp)": layout.groups("pp"),
        "sharing layers (tp)": layout.groups("tp"),
        "sharing experts (ep)": layout.expert_groups(),
        "summing gradients (dp x cp)": layout.groups("dp", "cp"),
    }
    assert told["groups"] == json.loads(json.dumps(expected))
    assert main(["doctor", "--pp", "2", "--dp", "64", "--no-links"]) == 0
    told = capsys.readouterr().out
    assert "0 1   2 3   4 5   6 7   and 60 more" in told and "0 2 ... 126" in told


def test_a_ring_of_local_processes_is_tested() -> None:
    links = result_of(run("--tp", "2", "--device", "cpu", "--json", command="doctor"))["links"]
    assert len(links["hosts"]) == 2 and links["device"] == "cpu"
    assert links["word_s"] > 0 and links["block_bytes_per_s"] > 0


def test_a_dry_run_prints_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path, "run", 8)
    layout = ["--parallel.pp", "2", "--parallel.dp", "2", "--parallel.tp", "2"]
    assert main(["train", str(file), "--dry-run", "--json", *layout]) == 0
    shared = json.loads(capsys.readouterr().out)
    assert shared["groups"]["sharing layers (tp)"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert main(["train", str(file), "--dry-run", "--json", *layout[:4]]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert shared["num_parameters"] == whole["num_parameters"]
    # All but the norms are divided.
    for ours, theirs in zip(shared["stages"], whole["stages"], strict=True):
        assert 0.5 <= ours["num_parameters"] / theirs["num_parameters"] < 0.53
