"""A run some of whose files are damaged or gone: every command says what it passes over, and uses nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.e2e.training import write_run
from tests.forged import change_header, forge

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the file and the output of a run with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder, "run", STEPS)
    assert main(train(folder)) == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def train(folder: Path, name: str = "run", *more: str) -> list[str]:
    file, output = str(folder / "run.toml"), str(folder / name)
    return [
        *("train", file, "--output", output, "--checkpoint.every", "2"),
        *("--parallel.pp", "1", "--parallel.device", "cpu", *more),
    ]


def checkpoint(folder: Path, step: int = STEPS) -> Path:
    return folder / "run" / "checkpoints" / f"step-{step:08d}"


def test_commands_that_pass_over_a_damaged_checkpoint_say_so_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, damaged = str(folder / "run"), checkpoint(folder)
    (damaged / "manifest.json").write_text("{}")
    texts = folder / "texts.jsonl"
    texts.write_text('{"text": "def f"}\n')
    capsys.readouterr()
    for command in (
        ["convert", run, str(folder / "converted"), "--json"],
        ["generate", run, "def", "--max-new-tokens", "2", "--device", "cpu"],
        ["score", run, str(texts), "--device", "cpu"],
        train(folder, "other", "--model.pretrained", run),
    ):
        assert main(command) == 0, command
        told = capsys.readouterr()
        assert told.err.count("refused") == told.err.count(f"checkpoint {damaged} is refused: its manifest.json") == 1
        if "--json" in command:
            assert json.loads(told.out)["step"] == STEPS - 2


def test_a_run_whose_weights_are_whole_numbers_is_not_converted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4, 6):
        [file] = checkpoint(folder, step).glob("*.safetensors")
        change_header(file, lambda header: header["embedding.weight"].update(dtype="I32"))
        forge(checkpoint(folder, step), lambda content: content["tensors"]["embedding.weight"].update(dtype="int32"))
    for command in (
        ["convert", str(folder / "run"), str(folder / "converted")],
        ["generate", str(folder / "run"), "def", "--device", "cpu"],
        train(folder),
    ):
        assert main(command) == 2, command
        assert "int32" in capsys.readouterr().err.replace("I32", "int32")


def move_out(path: Path, outside: Path) -> None:
    """Put a link in the place of a file, to where it now lies."""
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("pattern", ["manifest.json", "model-*.safetensors"])
def test_a_checkpoint_with_a_link_out_of_it_is_passed_over(
    pattern: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [file] = checkpoint(folder).glob(pattern)
    move_out(file, folder / "outside")
    capsys.readouterr()
    for command in (
        ["convert", str(folder / "run"), str(folder / "converted")],
        ["generate", str(folder / "run"), "def", "--max-new-tokens", "2", "--device", "cpu"],
        train(folder),
    ):
        assert main(command) == 0, command
        assert f"refused: {file} is a link to {folder}/outside/{file.name}, outside" in capsys.readouterr().err


def test_a_runs_folders_may_be_links(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, checkpoints = folder / "run", folder / "run" / "checkpoints"
    shutil.move(checkpoints, folder / "disk")
    checkpoints.symlink_to(folder / "disk")
    (folder / "reached").symlink_to(run)
    for command in (
        ["convert", str(folder / "reached"), str(folder / "converted")],
        ["generate", str(folder / "reached"), "def", "--max-new-tokens", "2", "--device", "cpu"],
        train(folder),
        train(folder, "reached"),
    ):
        capsys.readouterr()
        assert main(command) == 0, command
        assert "refused" not in capsys.readouterr().err
