"""Schedules from files: taken by every command, and refused with file, place and rule before anything is started."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.e2e.training import write_run

ROW_0 = "0F0,0F1,0B0,0B1"

# What is wrong, and what the refusal says of it behind the file's name.
BAD = {
    "malformed cell": (
        f"{ROW_0}\n1F0,1X0,1F1,1B1\n",
        r"row 2, cell 2: '1X0' is no action: an action is <stage><op>.*, or a pair as",
    ),
    "ranks that wait for each other": (
        "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
        "row 2, cell 1: deadlock.*: rank 1 at 1F1 waits until rank 0 starts 0SEND_F1; rank 0 at 0B0 waits",
    ),
}


@pytest.mark.parametrize("name", ["malformed cell", "ranks that wait for each other"])
@pytest.mark.parametrize("command", ["verify", "show", "simulate", "export"])
def test_a_wrong_file_is_refused_by_every_command(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "wrong.csv"
    path.write_text(BAD[name][0])
    words = ["--output", str(tmp_path / "out.txt")] if command == "export" else []
    assert main(["schedule", command, str(path), *words]) == 2
    out, err = capsys.readouterr()
    # What hangs is drawn up to there.
    assert out == "" or (command == "show" and "up to where it hangs" in out)
    assert re.fullmatch(rf"penstock: {re.escape(str(path))}: .*{BAD[name][1]}[^\n]*\n", err), err
    assert [found.name for found in tmp_path.iterdir()] == ["wrong.csv"]


def test_a_wrong_file_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text, told = BAD["ranks that wait for each other"]
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    file = write_run(tmp_path, "run", 4)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(file), "--schedule.name", str(path), "--train.num_microbatches", "2"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.match(rf"penstock: {re.escape(str(path))}: .*{told}", err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_other_counts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "two.csv"
    path.write_text(f"{ROW_0}\n1F0,1B0,1F1,1B1\n")
    assert main(["schedule", "show", "--ranks", "3", str(path)]) == 2
    assert f"{path} has 2 ranks, not 3" in capsys.readouterr().err
    file = write_run(tmp_path, "run", 4)
    assert main(["train", str(file), "--schedule.name", str(path)]) == 2
    assert f"{path} is for 2 ranks and 2 microbatches, not for 2 and 4" in capsys.readouterr().err


def test_what_is_no_text_no_file_or_of_another_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    (tmp_path / "folder.csv").mkdir()
    file = str(write_run(tmp_path, "run", 4))
    for name, told in (
        ("picture.csv", "is not UTF-8"),
        ("folder.csv", "is a folder; give a file ending in .csv or .txt"),
        ("nowhere.csv", "no such file"),
    ):
        path = str(tmp_path / name)
        for words in (
            ["schedule", "verify", path],
            ["schedule", "show", path],
            ["train", file, "--schedule.name", path],
        ):
            assert main(words) == 2
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert path in err and told in err
    assert main(["schedule", "show", "schedule.xlsx"]) == 2
    assert "there is no schedule 'schedule.xlsx'" in capsys.readouterr().err
    assert main(["train", file, "--schedule.name", "schedule.xlsx"]) == 2
    assert "a file ending in .csv or .txt" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["csv", "txt"])
@pytest.mark.parametrize("transfers", [[], ["--transfers"]])
def test_every_command_takes_a_file_that_is_right(
    ending: str, transfers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, again = tmp_path / f"right.{ending}", tmp_path / f"again.{ending}"
    size = ["--ranks", "3", "--microbatches", "5"]
    assert main(["schedule", "export", "zb-v", *size, *transfers, "--output", str(path)]) == 0
    assert main(["schedule", "export", "--output", str(again), *transfers, str(path)]) == 0
    assert again.read_text() == path.read_text()
    capsys.readouterr()
    assert main(["schedule", "simulate", "--json", str(path)]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main(["schedule", "simulate", "zb-v", *size, "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert from_file.pop("schedule") == str(path) and built.pop("schedule") == "zb-v"
    assert from_file == built
    assert main(["schedule", "show", str(path)]) == 0
    assert capsys.readouterr().out.count("\nrank ") == 3
