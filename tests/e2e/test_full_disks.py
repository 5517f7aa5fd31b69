"""A full disk or standard output: one sentence with the path, nothing left behind, no step of training lost."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.output import ResultsFile, write_text
from tests.e2e.training import write_run
from tests.fork_server import Forked, run_command
from tests.full_disk import full_disk
from tests.hugging_face import make_model

TEXTS = '{"text": "def f1(x):"}\n{"text": "    return x"}\n'
TOKENS = '{"tokens": [1, 2, 3]}\n{"tokens": [4, 5, 6]}\n'
REASON = "no space left on device"


def run_with_output(*words: str) -> int:
    """`python -m penstock` with these words and a standard output that is full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    return run_command(words)


def call(*words: object) -> tuple[int | None, str]:
    """The exit code and the standard error of a command with such a standard output."""
    process = Forked(run_with_output, *map(str, words), environ=dict(os.environ))
    err = process.communicate(timeout=120)[1]
    return process.returncode, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int | None, str]:
    """A run's folder, and how its training ended."""
    folder = tmp_path_factory.mktemp("trained")
    return folder / "run", *call("train", write_run(folder, "run", 6), "--parallel.pp", 1)


def test_training_goes_on_without_its_progress_lines(trained: tuple[Path, int | None, str]):
    folder, code, err = trained
    assert err == f"penstock: standard output: {REASON}; going on without progress lines\n"
    assert code == 0
    assert (folder / "checkpoints" / "step-00000006").is_dir()


def test_a_result_that_cannot_be_printed_is_one_sentence(trained: tuple[Path, int | None, str], tmp_path: Path):
    (tmp_path / "texts.jsonl").write_text(TEXTS)
    said = f"standard output: {REASON}\n"
    code, err = call("generate", trained[0], "def ", "--max-new-tokens", 3, "--pp", 1)
    assert re.fullmatch(rf"penstock: process 0: {said}", err), err
    assert code == 1
    assert call("schedule", "list") == (2, f"penstock: {said}")
    words = (trained[0], tmp_path / "texts.jsonl", "--pp", 1, "--json", "--output", tmp_path / "scores.jsonl")
    code, err = call("score", *words)
    assert err.endswith(f"penstock: process 0: {said}")
    assert "Traceback" not in err
    assert code == 1
    assert call("schedule", "--help") == (2, f"penstock: {said}")
    assert call("generate", "--help") == (2, f"penstock: {said}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", ["score", "generate"])
def test_a_full_disk_under_the_lines_written_is_one_sentence_with_their_file(
    model: Path,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    given, output = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
    given.write_text(TOKENS)
    words = [given] if command == "score" else ["--file", given, "--max-new-tokens", 3]
    write = ResultsFile.write

    def on_full_disk(file: ResultsFile, results: list[Any], *, to_disk: bool) -> None:
        with full_disk():
            write(file, results, to_disk=to_disk)

    arguments = [command, str(model), *map(str, words), "--pp", "1", "--output", str(output)]
    with monkeypatch.context() as patch:
        patch.setattr(ResultsFile, "write", on_full_disk)
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(rf"penstock: process 0: {output}: file too large\n", err), err
    assert not output.exists()
    assert main(arguments) == 0
    assert len(output.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "words",
    [
        *(["schedule", "show", "1f1b", "--output", f"new.{ending}"] for ending in ("svg", "png", "html", "json")),
        ["schedule", "export", "1f1b", "--output", "new.csv"],
        ["rehearse", "run.toml", "--picture", "new.svg"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_first_write_that_failed_leaves_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "run", 6)
    before = sorted(os.listdir(tmp_path))
    with full_disk():
        assert main(words) == 2
    assert capsys.readouterr().err == f"penstock: {words[-1]}: file too large\n"
    assert sorted(os.listdir(tmp_path)) == before
    assert main(words) == 0
    assert sorted(os.listdir(tmp_path)) == sorted([*before, words[-1]])


def test_a_measured_cluster_on_a_full_disk_names_its_file_and_keeps_the_one_before(tmp_path: Path):
    path = tmp_path / "here.toml"
    write_text(path, "before", force=False)
    with full_disk(), pytest.raises(OSError, match="too large") as caught:
        write_text(path, "after", force=True)
    assert caught.value.filename == str(path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["here.toml"]
