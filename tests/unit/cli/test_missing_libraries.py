"""A library that is not installed is missed only by what needs it, and then in one sentence."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools.bounds import USERS_EXTRAS

from penstock.cli.main import LIBRARIES, REFUSED, main
from penstock.engine.folders.runs import read_run

NEEDED = {
    "rich": ("rich", "schedule show 1f1b --ranks 2 --microbatches 2"),
    "matplotlib": ("matplotlib", "schedule show 1f1b --ranks 2 --microbatches 2 --output {folder}/picture.svg"),
    "starlette": ("starlette", "serve nowhere"),
    "uvicorn": ("uvicorn", "serve nowhere"),
    "tokenizers": ("tokenizers", "train examples/tiny.toml --dry-run"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_library_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, words = NEEDED[name]
    for loaded in [module for module in sys.modules if module.startswith((name, "penstock.draw"))]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(words.format(folder=tmp_path).split()) == REFUSED
    shown = capsys.readouterr().err
    assert f"this needs the library {package}, which is not installed; install it with pip install {package}" in shown
    assert not list(tmp_path.iterdir())


def test_a_run_is_refused_before_it_starts_without_what_it_is_to_write_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    output = tmp_path / "run"
    assert main(["train", "examples/tiny.toml", "--log.tensorboard", "true", "--output", str(output)]) == REFUSED
    assert "log.tensorboard = true needs the library tensorboard, which is not installed" in capsys.readouterr().err
    assert not output.exists()


NEEDED_BY_ALL = {"torch", "numpy", "safetensors"}
WITHOUT_EXTRAS = """
import sys
import torch.utils.flop_counter  # what torch itself looks for while it is imported is there or not, as it likes
from penstock.cli.main import LIBRARIES, main
for name in LIBRARIES - {"torch", "numpy", "safetensors"}:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]
    sys.modules[name] = None
sys.exit(main(sys.argv[1:]))
"""


def test_three_libraries_are_installed_with_it() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == NEEDED_BY_ALL
    extras = project["optional-dependencies"]
    by_users = {Requirement(text).name for name in USERS_EXTRAS for text in extras[name]}
    # The command has a sentence for each of them; wandb is for those who have it.
    assert by_users | NEEDED_BY_ALL | {"wandb"} == LIBRARIES


def test_a_run_needs_three_libraries(tmp_path: Path) -> None:
    output = tmp_path / "run"
    (tmp_path / "corpus.txt").write_text("A penstock is a pipe. " * 500)
    places = f"--data.corpus {tmp_path}/corpus.txt --data.cache {tmp_path}/cache --output {output}"
    steps = "--train.steps 3 --optimizer.num_warmup_steps 1 --validation.every 0 --parallel.pp 1"
    words = ["--data.tokenizer", "bytes", *places.split(), *steps.split()]
    for command in (["train", "examples/tiny.toml", *words], ["generate", str(output), "def", "--max-new-tokens", "3"]):
        run = [sys.executable, "-c", WITHOUT_EXTRAS, *command]
        done = subprocess.run(run, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
    assert (output / "run.toml").is_file() and not (output / "tensorboard").exists()
    assert read_run(output).train.steps == 3


def test_a_module_of_a_users_own_that_is_missing_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'my_layers'", name="my_layers")

    monkeypatch.setattr("penstock.cli.main._run", missing)
    with pytest.raises(ModuleNotFoundError, match="my_layers"):
        main([])
