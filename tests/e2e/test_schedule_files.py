"""Schedules from files: taken by every command, and refused with file, place and rule before anything is started."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.schedule import ScheduleError, build, to_text
from penstock.schedule.files import read_program
from tests.e2e.training import write_run

ROW_0 = "0F0,0F1,0B0,0B1"

# What is wrong, and what the refusal says of it behind the file's name.
BAD = {
    "malformed cell": (
        f"{ROW_0}\n1F0,1X0,1F1,1B1\n",
        r"row 2, cell 2: '1X0' is no action: an action is <stage><op>.*, or a pair as",
    ),
    "no stage": ("0F0,F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "row 1, cell 2: 'F1' is no action"),
    "unknown action": (f"{ROW_0}\n1F0,1GO0,1F1,1B1\n", "row 2, cell 2: '1GO0' is no action"),
    "another language": ("<html>hello</html>\n", "row 1, cell 1: '<html>hello</html>' is no action"),
    "backward before forward": (f"{ROW_0}\n,1B0,1F0,1F1,1B1\n", "row 2, cell 2: 1B0 needs 1F0 before it in its row"),
    "W before I": ("0F0,0W0,0I0\n1F0,1B0\n", "row 1, cell 2: 0W0 needs 0I0 before it"),
    "ranks that wait for each other": (
        "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
        "row 2, cell 1: deadlock.*: rank 1 at 1F1 waits until rank 0 starts 0SEND_F1; rank 0 at 0B0 waits",
    ),
    "stage on the wrong rank": (f"{ROW_0}\n1F0,0B0,1F1,1B1\n", "row 2, cell 2: 0B0 is on stage 0 of row 1"),
    "other microbatches in another order of ranks": (f"1F0,1B0\n{ROW_0}\n", "row 1: 1F1 is missing"),
    "a stage that is nowhere": (f"{ROW_0}\n2F0,2B0\n", "row 2 has stage 2, but no row has stage 1"),
    "repeated action": (f"{ROW_0}\n1F0,1B0,1F1,1B1,1B1\n", "row 2, cell 5: 1B1 repeats cell 4"),
    "B and I": (f"{ROW_0}\n1F0,1B0,1F1,1B1,1I1\n", "row 2, cell 5: 1I1 cannot come beside 1B1 of row 2, cell 4"),
    "missing backward": (f"{ROW_0}\n1F0,1B0,1F1\n", "row 2: 1B1, or an I and a W, is missing"),
    "missing W": (f"{ROW_0}\n1F0,1I0,1F1,1B1\n", "row 2: 1W0 is missing"),
    "missing forward": (f"{ROW_0}\n1F0,1B0\n", "row 2: 1F1 is missing"),
    "missing microbatch": ("0F0,0F2,0B0,0B2\n1F0,1B0,1F2,1B2\n", "row 1, cell 2: 0F2 has a number too high"),
    "missing send": ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "row 1: .*0SEND_F0 is missing"),
    "missing receive": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n",
        "row 2, cell 1: .*1F0 waits for 1RECV_F0, which this rank does not have",
    ),
    "crossed messages": (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1\n",
        "row 1, cell 2: rank 0 sends 0SEND_F0 as message 1 to rank 1, which waits there for 1RECV_F1",
    ),
    "a pair that needs itself": ("(0F0;0B0)OVERLAP_F_B\n", "row 1, cell 1: 0B0 needs 0F0, so they cannot be one pair"),
    "step": ("0F0,0B0,STEP\n", "row 1, cell 3: STEP is not written in a CSV"),
    "open quotation": ('0F0,"0B0\n', "row 1 is not CSV"),
    "empty": ("", "the file is empty: it needs a row for each rank"),
    "empty row": (f"{ROW_0}\n\n1F0\n", "row 2 is empty: each row is a rank"),
    "a number that no file can hold": ("0F999999999\n", "0F999999999 has a number too high"),
    "another version": ("penstock schedule 9\n", "line 1: expected 'penstock schedule 1'"),
    "repeated word": (
        to_text(build("1f1b", ranks=2, microbatches=2)).replace("0B1", "0B0"),
        r"line 9, word 4: 0B0 cannot come beside 0B0 of line 9, word 3",
    ),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_a_wrong_file_is_refused_with_place_and_rule(text: str, told: str, tmp_path: Path):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=f"^{re.escape(str(path))}: .*{told}") as caught:
        read_program(path)
    assert "\n" not in str(caught.value)


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
    assert "nor a file ending in .csv or .txt" in capsys.readouterr().err


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
