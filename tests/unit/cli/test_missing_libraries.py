"""A library that is not installed is missed only by what needs it, and then in one sentence."""

import sys
from pathlib import Path

import pytest

from penstock.cli.main import REFUSED, main

NEEDED = {
    "shtab": ("shtab", "--print-completion bash"),
    "rich": ("rich", "schedule show 1f1b --ranks 2 --microbatches 2"),
    "matplotlib": ("matplotlib", "schedule show 1f1b --ranks 2 --microbatches 2 --output {folder}/picture.svg"),
    "tomli_w": (
        "tomli-w",
        "plan --model llama3-8b --cluster h100 --devices 8 --output {folder}/run.toml",
    ),
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


@pytest.mark.parametrize(
    ("name", "needs"), [("tomli_w", "a run needs"), ("tensorboard", "log.tensorboard = true needs")]
)
def test_a_run_is_refused_before_it_starts_without_what_it_writes_with(
    name: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    output = tmp_path / "run"
    assert main(["train", "examples/tiny.toml", "--output", str(output)]) == REFUSED
    assert f"{needs} the library {name.replace('_', '-')}, which is not installed" in capsys.readouterr().err
    assert not output.exists()


def test_a_module_of_a_users_own_that_is_missing_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'my_layers'", name="my_layers")

    monkeypatch.setattr("penstock.cli.main._run", missing)
    with pytest.raises(ModuleNotFoundError, match="my_layers"):
        main([])
