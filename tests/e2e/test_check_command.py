"""`penstock check`: of a script, of a run, and what it refuses."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

import torch
from torch import nn

from penstock import Engine, Layout, PackedBatch

place = {}


class Leaves(nn.Linear):
    def forward(self, x):
        place["x"] = x.detach()
        return super().forward(x)


class Takes(nn.Linear):
    def forward(self, x):
        return super().forward(x) + place["x"]


print("made with", sys.argv[1:])
layers = [nn.Embedding(16, 8), Leaves(8, 8), Takes(8, 8), nn.Linear(8, 16)]
engine = Engine.from_layers(layers, hidden_size=8, layout=Layout(pp=4))
try:
    engine.train_batch(PackedBatch.from_documents([list(range(n)) for n in (5, 3, 7, 4)]))
except Exception:
    print("not reached")
"""
BATCH = "PackedBatch.from_documents([list(range(n)) for n in (5, 3, 7, 4)])"


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.shows(195)
def test_the_layers_of_a_script_are_checked_up_to_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, SCRIPT)
    assert main(["check", script, "--width", "8"]) == 1
    shown = capsys.readouterr()
    assert "the engine fails" in shown.out or "the output of layers.2 differs" in shown.out
    assert "usual cause: a layer leaves something for a layer of another stage" in shown.out
    assert "made with ['--width', '8']" in shown.err
    assert "not reached" not in shown.err

    assert main(["check", "--json", script]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is_equal"] is False
    assert found["differences"][0]["way"] == "apart"
    assert "left_behind" in [cause["name"] for cause in found["differences"][0]["causes"]]


@pytest.mark.shows(195)
def test_an_example_with_processes_of_its_own_is_checked_without_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(ROOT / "examples" / "own_layers.py")]) == 0
    assert capsys.readouterr().out.startswith("equal, bit for bit: 2 steps in 2 stages")


@pytest.mark.shows(195)
def test_the_model_of_a_run_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--pp", "3", "--json", str(ROOT / "examples" / "tiny.toml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_equal"] is True
    assert found["compared"].startswith("2 steps in 3 stages")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('done')", "ended without a call of train_batch"),
        (
            SCRIPT.replace("PackedBatch.from_documents([", "iter([PackedBatch.from_documents(["),
            "an iterator of microbatches",
        ),
        (SCRIPT.replace("(5, 3, 7, 4)", "(5,)"), "2 items or more to split; this one has 1"),
        (SCRIPT.replace(BATCH, "[]"), "trains on an empty list"),
    ],
    ids=["no step", "a source", "one item", "an empty list"],
)
def test_a_script_that_cannot_be_checked_is_refused_in_one_sentence(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text.replace("(5, 3, 7, 4)]))", "(5, 3, 7, 4)])]))") if "iter(" in text else text
    assert main(["check", write(tmp_path, text)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "the following arguments are required: FILE"),
        (["."], ".: is a directory"),
        (["nothing.py"], "nothing.py: no such file"),
        (["--pp", "9"], "9 stages need as many layers; there are 4"),
    ],
    ids=["no file", "a folder", "none there", "too many stages"],
)
def test_a_command_that_cannot_be_done_is_refused_in_one_sentence(
    words: list[str], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, write(tmp_path, SCRIPT)] if "--pp" in words else words
    assert main(["check", *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert shown in line
    assert "ARGUMENT" not in line


@pytest.mark.shows(195)
def test_microbatches_of_a_list_and_layers_given_by_name_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = "PackedBatch.from_documents([[1, 2], [3, 4, 5]])"
    text = SCRIPT.replace("from_layers(layers", "from_layers(layers=layers").replace('+ place["x"]', "")
    text = text.replace(f"train_batch({BATCH})", f"train_batch([{two}, {two}])")
    assert main(["check", write(tmp_path, text)]) == 0
    assert "with 4 and 2 microbatches" in capsys.readouterr().out


def test_a_warning_of_a_loss_is_given_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = SCRIPT.replace(BATCH, f"{BATCH}, loss_fn=lambda x, y: nn.functional.cross_entropy(x, y['labels'])")
    assert main(["check", write(tmp_path, text.replace('+ place["x"]', ""))]) == 1
    assert sum("gives the mean" in record.getMessage() for record in caplog.records) == 1


def test_an_error_of_a_script_is_shown_from_its_own_line_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "def train():\n    raise KeyError('rows')\n\n\ntrain()\n")
    with pytest.raises(SystemExit) as ended:
        main(["check", script])
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 5, in <module>',
        "    train()",
        f'  File "{script}", line 2, in train',
        "    raise KeyError('rows')",
        "KeyError: 'rows'",
    ]
