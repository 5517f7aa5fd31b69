"""What every command shares: tables of commands, a parser whose errors are one sentence, and files never lost."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class Command:
    """A command's line in the help, and where its `main(arguments) -> exit code` is found once it is asked for."""

    summary: str
    module: str
    function: str = "main"

    def load(self) -> Main:
        return getattr(import_module(self.module), self.function)


def nearest(given: str, known: Iterable[str], *, what: str) -> ValueError:
    """The error for a name that is not known; it names the nearest that is, or all of them."""
    from difflib import get_close_matches

    known = list(known)
    near = get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return ValueError(f"no {what} is called {given!r}; {hint}")


def dispatch(program: str, table: Mapping[str, Command], arguments: list[str], *, head: str, foot: str = "") -> int:
    """Run the command that the first argument names, or print the table of all of them as help.

    Returns: the command's exit code; 2 after the help that nobody asked for.
    Raises: ValueError naming the nearest command if there is none of that name.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(program, table, head, foot))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in table:
        if name.startswith("-"):
            raise ValueError(f"{program} takes a command before {name!r}: {', '.join(table)}")
        raise nearest(name, table, what=f"{program} command")
    return table[name].load()(rest)


def help_text(program: str, table: Mapping[str, Command], head: str, foot: str) -> str:
    margin = max(map(len, table)) + 2
    rows = "\n".join(f"  {name:{margin}}{command.summary}" for name, command in table.items())
    return "\n\n".join(part for part in (f"usage: {program} COMMAND ...", head, f"commands:\n{rows}", foot) if part)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and whose errors are ValueErrors of one sentence."""

    def __init__(self, prog: str, description: str, *, examples: Sequence[str] = ()) -> None:
        epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        options, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            name = word.partition("=")[0]
            if name.startswith("--"):
                raise nearest(name, self._option_string_actions, what=f"option of {self.prog}")
            raise ValueError(f"{self.prog} has no use for {word!r}; {self.prog} --help says what it takes")
        return options

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def print_json(value: object) -> None:
    """Print one JSON document; numbers that JSON does not have are an error, not a surprise for the reader."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def print_table(cells: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, the head first, in columns as wide as they need to be; all but the first are numbers."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *numbers]))


def refuse_to_overwrite(path: Path, *, force: bool) -> None:
    """Make sure that a file may be written.

    Raises: ValueError if it exists and `force` is not given, or if its folder does not exist.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists already and was left as it is; give another name, or --force to replace it")


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all.

    Raises: ValueError as `refuse_to_overwrite` does.
    """
    refuse_to_overwrite(path, force=force)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
