"""The demo ends with commands that exist."""

import shlex
from pathlib import Path

import pytest
from tools import demo

from penstock.cli import schedule
from penstock.cli.main import COMMANDS

STEPS = demo.next_steps(Path("runs/demo-2"))


@pytest.mark.parametrize("command", [command for command, _ in STEPS])
def test_what_to_try_next_are_commands(command: str) -> None:
    program, name, *words = shlex.split(command)
    assert program == "penstock"
    table = COMMANDS[name].parser() if name != "schedule" else schedule.COMMANDS[words.pop(0)].parser()
    table.parse_args(words)
    files = [word for word in words if word.startswith("examples/")]
    assert all((demo.ROOT / file).is_file() for file in files)
