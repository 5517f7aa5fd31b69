"""Whether commands that a page shows and the tests do not run exist, and take the options that the page gives them."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.run import get_args_parser

from penstock.cli.main import COMMANDS
from penstock.cli.options import Command
from penstock.cli.train import read_arguments

ROOT = Path(__file__).parents[2]


class _Parsed(Exception):
    """A script's own parser has taken its arguments, but for those that it does not know."""

    #: the words that it does not know
    unknown: list[str]

    def __init__(self, unknown: list[str]) -> None:
        super().__init__()
        self.unknown = unknown


def check_command(words: Sequence[str]) -> None:
    """Check a command by the parsers that would read it.

    Raises: ValueError for a command that no rule covers, or a word that its parser does not take.
    """
    program, *arguments = [word for word in words if word != "&"]
    rules = {"penstock": _penstock, "torchrun": _torchrun, "python": _script, "make": _make, "pip": _pip}
    rules |= {"git": _git, "cd": _cd}
    if Path(program).name not in rules:
        raise ValueError(f"no rule covers the command {program!r}")
    rules[Path(program).name](arguments)


def _penstock(words: Sequence[str], table: Mapping[str, Command] = COMMANDS) -> None:
    if words[0] not in table:
        raise ValueError(f"there is no command {words[0]!r}")
    name, *rest = words
    inner = getattr(import_module(table[name].module), "COMMANDS", None)
    if inner and table[name] not in inner.values():
        _penstock(rest, inner)
    elif name == "train":
        # Its parser of all settings takes any value; this one looks at them. The file may be the reader's own.
        read_arguments(rest[not rest[0].startswith("-") :])
    else:
        table[name].parser().parse_args(rest)


def _torchrun(words: Sequence[str]) -> None:
    def refuse(message: str) -> None:
        raise ValueError(f"torchrun: {message}")

    parser = get_args_parser()
    parser.allow_abbrev, parser.error = False, refuse  # pyright: ignore[reportAttributeAccessIssue]
    given = parser.parse_args(list(words))
    if not given.module:
        _script([given.training_script, *given.training_script_args])
    elif given.training_script == "penstock":
        _penstock(given.training_script_args)
    else:
        raise ValueError(f"no rule covers the module {given.training_script!r}")


def _script(words: Sequence[str]) -> None:
    path = ROOT / words[0]
    if not path.is_file():
        raise ValueError(f"there is no {words[0]}")
    if "argparse" not in path.read_text():
        if words[1:]:
            raise ValueError(f"{words[0]} takes no arguments, but {words[1]!r} follows it")
        return
    own = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Parsed(own(parser, list(words[1:]))[1])

    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_known_args", parse),
            patch.object(sys, "argv", list(words)),
            patch.object(sys, "path", [str(path.parent), *sys.path]),
        ):
            runpy.run_path(str(path), run_name="__main__")
    except _Parsed as parsed:
        # Words that it does not know may be for what it starts.
        if parsed.unknown and "parse_known_args" not in path.read_text():
            raise ValueError(f"{words[0]} does not take {shlex.join(parsed.unknown)}") from None
        return
    except SystemExit as error:
        raise ValueError(f"{words[0]} does not take {shlex.join(words[1:])}") from error
    raise ValueError(f"{words[0]} parses nothing")


def _make(words: Sequence[str]) -> None:
    """Look at what a target would run: make says so without running it."""
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    for line in done.stdout.splitlines():
        tool = re.match(r"@?\.venv/bin/python (tools/\w+\.py.*)", line)
        if tool and "ARGS" in "".join(words):
            _script(shlex.split(tool[1]))


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _git(words: Sequence[str]) -> None:
    if list(words) != ["clone", _project()["urls"]["Repository"]]:
        raise ValueError(f"git {shlex.join(words)} clones nothing of ours")


def _cd(words: Sequence[str]) -> None:
    """The one folder that a page enters is the clone."""
    if list(words) != [Path(_project()["urls"]["Repository"]).name]:
        raise ValueError(f"cd {shlex.join(words)} enters no clone of ours")


def _pip(words: Sequence[str]) -> None:
    project = _project()
    # In the repository's folder, until a release is on an index.
    found = re.fullmatch(r"install \.\[([\w,]+)\]", " ".join(words))
    if found is None or not set(found[1].split(",")) <= project["optional-dependencies"].keys():
        raise ValueError(f"pip {shlex.join(words)} installs nothing of ours")
