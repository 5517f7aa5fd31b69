"""`penstock rehearse`: what it prints, draws and refuses."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.rehearse import _to_json
from penstock.schedule.rehearsal import MemoryKind, MemoryPoint, Rehearsal

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


def test_no_kind_has_more_at_the_peak_than_at_most() -> None:
    tape, kept = MemoryKind.TAPE, MemoryKind.PARAMETERS
    # One tape grows in the fullest action before another is freed.
    timeline = (
        MemoryPoint("0F0", {kept: 7, tape: 40}, {tape: 30}),
        MemoryPoint("0I0", {kept: 7, tape: 44}, {tape: 41}),
    )
    found = Rehearsal(0, "pp 0", "cuda", "v-half", 1, (), timeline, (), ())
    assert _to_json(found)["most_bytes"] == {**dict.fromkeys(map(str, MemoryKind), 0), "tape": 44, "parameters": 7}
