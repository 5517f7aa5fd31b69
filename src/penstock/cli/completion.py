"""Completion of commands and options in a shell, as shtab writes it from the commands' own parsers."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.cli.commands import Command, Parser
from penstock.schedule import names


def script(shells: Sequence[str], table: Mapping[str, Command]) -> str:
    """Write the script that makes a shell complete `penstock`.

    Raises: ValueError unless one shell is given, of those that shtab knows.
    """
    import shtab

    if len(shells) != 1 or shells[0] not in shtab.SUPPORTED_SHELLS:
        given = f", not {' '.join(shells)}" if shells else ""
        raise ValueError(f"--print-completion takes one of {', '.join(shtab.SUPPORTED_SHELLS)}{given}")
    root = Parser("penstock", "")
    root.add_argument("--version", action="store_true", help="print the versions of Penstock, torch and Python")
    root.add_argument("--print-completion", choices=shtab.SUPPORTED_SHELLS, help="print a script such as this one")
    _add_commands(root, table)
    return shtab.complete(root, shells[0])


def _add_commands(parent: Parser, table: Mapping[str, Command]) -> None:
    parsers = {f"{parent.prog} {name}": _parser_of(f"{parent.prog} {name}", own) for name, own in table.items()}

    def made(*, prog: str, **_: Any) -> argparse.ArgumentParser:
        return parsers[prog]

    commands = parent.add_subparsers(prog=parent.prog, metavar="COMMAND", parser_class=made)  # pyright: ignore
    for name, command in table.items():
        commands.add_parser(name, help=command.summary)


def _parser_of(program: str, command: Command) -> Parser:
    inner: Mapping[str, Command] | None = getattr(import_module(command.module), "COMMANDS", None)
    if inner and command not in inner.values():
        found = Parser(program, command.summary)
        _add_commands(found, inner)
        return found
    found = command.parser()
    found.description = command.summary
    for action in found._actions:
        _complete(action, program)
    return found


def _complete(action: argparse.Action, program: str) -> None:
    """Have a path completed as one, a schedule by its names, and a setting by the values that its metavar lists."""
    import shtab

    shown = action.metavar if isinstance(action.metavar, str) else ""
    is_schedule = action.dest == "name" and not action.option_strings
    # Most schedules that are to be proved lie in files.
    if action.type is Path or (is_schedule and program.endswith(" verify")):
        action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    elif is_schedule or action.dest == "schedule.name":
        action.choices = names()
    elif action.choices is None and shown.startswith("{"):
        action.choices = shown.strip("{}").split(",")
