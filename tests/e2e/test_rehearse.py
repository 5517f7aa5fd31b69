"""`penstock rehearse`: what it prints, draws and refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import schedule
from penstock.cli.main import main
from penstock.cli.rehearse import _to_json
from penstock.schedule.rehearsal import MemoryKind, MemoryPoint, Rehearsal
from penstock.schedule.text import parse_step

RUN = """
output = "runs/none"
[model]
vocab_size = 64
hidden_size = 16
intermediate_size = 32
num_layers = 1
num_heads = 2
[data]
corpus = "nowhere"
sequence_length = 8
num_sequences = 2
[parallel]
pp = 2
[train]
num_microbatches = 2
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_memory_units_and_messages_are_printed_and_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = run.parent / "memory.svg"
    assert main(["rehearse", str(run), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    for word in ("rank 0", "peak", "tape", "optimizer", "layers.0.attention", "forward to pp rank 1"):
        assert word in shown
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and "0F0" in drawn and "transient" in drawn
    assert main(["rehearse", str(run), "--picture", str(picture)]) == 2


def test_json_has_every_rank_that_was_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(run), "--rank", "all", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in found] == [0, 1]
    for one in found:
        assert one["peak_bytes"] == max(sum(point["at_peak"].values()) for point in one["timeline"]) > 0
        assert {action["op"] for unit in one["units"] for action in unit["actions"]} == {"F", "B", "I", "W"}


def with_order(run: Path, words: str, recompute: str) -> Path:
    """The run, with tensors that are worth a move, and this order on its first rank."""
    larger = (
        RUN.replace("= 64", "= 256")
        .replace("hidden_size = 16", "hidden_size = 64")
        .replace("length = 8", "length = 64")
    )
    built = schedule.build("1f1b", ranks=2, microbatches=2)
    first = tuple(map(parse_step, words.split()))
    order = run.parent / f"{recompute}.txt"
    order.write_text(schedule.to_text(replace(built, orders=(first, built.orders[1]))))
    path = run.parent / f"{recompute}.toml"
    path.write_text(f'{larger}recompute = "{recompute}"\n[schedule]\nname = "{order}"\n')
    return path


@pytest.mark.shows(210)
def test_what_moves_to_host_memory_is_rehearsed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tapes = []
    for words in ("0F0 0F1 0B0 0B1", "0F0 0O0 0F1 0O1 0L0 0B0 0L1 0B1"):
        assert main(["rehearse", str(with_order(run, words, "none")), "--device", "cpu", "--json"]) == 0
        tapes.append(json.loads(capsys.readouterr().out)[0]["most_bytes"]["tape"])
    # At most one microbatch is here at once; of the other its input is left.
    assert tapes[0] / 2 <= tapes[1] < 0.7 * tapes[0]


@pytest.mark.shows(210)
def test_activations_that_are_all_kept_are_not_computed_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "0F0 0F1 0R0 0B0 0B1"
    assert main(["rehearse", str(with_order(run, words, "full")), "--device", "cpu"]) == 0
    capsys.readouterr()
    for command in (["rehearse"], ["train"], ["train", "--dry-run"]):
        corpus = ["--data.corpus", "stdlib"] if command[0] == "train" else []
        assert main([command[0], str(with_order(run, words, "none")), *command[1:], *corpus]) == 2
        told = capsys.readouterr().err
        assert told.endswith("but all are kept; set train.recompute\n") and told.count("\n") == 1, told


def test_no_kind_has_more_at_the_peak_than_at_most() -> None:
    tape, kept = MemoryKind.TAPE, MemoryKind.PARAMETERS
    # One tape grows in the fullest action before another is freed.
    timeline = (
        MemoryPoint("0F0", {kept: 7, tape: 40}, {tape: 30}),
        MemoryPoint("0I0", {kept: 7, tape: 44}, {tape: 41}),
    )
    found = Rehearsal(0, "pp 0", "cuda", "v-half", 1, (), timeline, (), ())
    assert _to_json(found)["most_bytes"] == {**dict.fromkeys(map(str, MemoryKind), 0), "tape": 44, "parameters": 7}
