"""The help of every command: two screens of 80 columns, examples at the end that are true, and nothing heavy loaded."""

import argparse
import json
import shlex
import subprocess
import sys

import pytest

from penstock.cli import schedule
from penstock.cli.main import COMMANDS, main
from penstock.cli.options import Command
from penstock.settings import SETTINGS

PROGRAMS: dict[tuple[str, ...], Command] = {
    **{(name,): command for name, command in COMMANDS.items() if name != "schedule"},
    **{("schedule", name): command for name, command in schedule.COMMANDS.items()},
}
EVERY = [(), ("schedule",), *PROGRAMS]
# Two screens. What is added beyond goes into a section of its own, or out of the help into the documentation.
MAX_LINES, MAX_COLUMNS = 110, 80

# Runs in a process of its own, which has loaded nothing yet; on a wide terminal lines might get longer.
PROBE = """
import contextlib, io, json, os, sys
os.environ["COLUMNS"] = "200"
from penstock.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    heavy = {"torch", "numpy", "transformers", "tokenizers", "matplotlib", "rich", "starlette"}
    found.append((shown.getvalue(), sorted(heavy & set(sys.modules))))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps() -> dict[tuple[str, ...], tuple[str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(EVERY)], capture_output=True, text=True, timeout=300, check=True
    )
    return dict(zip(EVERY, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_fits_two_screens_and_ends_with_examples(helps: dict, words: tuple[str, ...]) -> None:
    text, loaded = helps[words]
    lines = text.rstrip().splitlines()
    assert 5 < len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []
    assert [line for line in lines if line and not line.startswith(" ")][-1] == "examples:"
    assert loaded == []


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    inner = [
        found
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for one in action.choices.values()
        for found in options_of(one)
    ]
    return [*(action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)), *inner]


@pytest.mark.parametrize("words", PROGRAMS, ids=" ".join)
def test_every_option_has_its_help(words: tuple[str, ...]) -> None:
    options = options_of(PROGRAMS[words].parser())
    assert len(options) >= 2
    assert [action.option_strings for action in options if not action.help] == []


def examples_of(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", "").partition("\nexamples:\n")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("  penstock ")]


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_examples_are_commands(helps: dict, words: tuple[str, ...]) -> None:
    examples = examples_of(helps[words][0])
    assert examples
    for example in examples:
        assert tuple(example[: len(words)]) == words
        length = 2 if example[0] == "schedule" else 1
        given = example[length:]
        command = PROGRAMS[tuple(example[:length])]
        # A schedule that an example names may have options of its own.
        has_own = command.function in ("show", "simulate", "export")
        parser = getattr(schedule, f"{command.function}_parser")(given) if has_own else command.parser()
        parser.parse_args(given)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_all_settings_are_shown_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "examples/tiny.toml", "--help-all")
    assert [name for name in SETTINGS if f"--{name} " not in text] == []
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS


@pytest.mark.parametrize("section", sorted({own.section for own in SETTINGS.values() if own.section}))
def test_a_section_is_shown_on_demand(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help", section)
    assert len(text.splitlines()) <= MAX_LINES
    for name, own in SETTINGS.items():
        assert (f"  --{name} " in text) == (own.section == section), name


def test_an_unknown_section_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "optimiser"]) == 2
    assert "nearest one is optimizer" in capsys.readouterr().err
    assert main(["train", "--help", "train.step"]) == 2
    assert "nearest one is train.steps" in capsys.readouterr().err
