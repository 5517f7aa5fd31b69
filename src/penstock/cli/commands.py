"""Helpers of every command: tables of commands, a parser with one-sentence errors, and files that are never lost."""

import argparse
import fcntl
import glob
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn

from penstock.io.files import check_file, naming, parse_json, whole_file
from penstock.settings.declare import nearest, suggestion

#: columns of every help, which a terminal has at the least
WIDTH = 80

Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class Command:
    """A command's line in the help, and the place of its `main(arguments) -> exit code`, imported on use."""

    summary: str
    module: str
    function: str = "main"

    def load(self) -> Main:
        return getattr(import_module(self.module), self.function)

    def parser(self) -> "Parser":
        """The parser that the command reads its arguments with: `parser()` of its module, or `<function>_parser()`."""
        name = "parser" if self.function == "main" else f"{self.function}_parser"
        return getattr(import_module(self.module), name)()


def dispatch(program: str, table: Mapping[str, Command], arguments: list[str], *, head: str, foot: str = "") -> int:
    """Run the command that the first argument names, or print the table of all of them as help.

    Returns: the command's exit code; 2 after help that was not asked for.
    Raises: ValueError naming the nearest command for an unknown name.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(program, table, head, foot))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in table:
        if name.startswith("-"):
            raise ValueError(f"{program} takes a command before {name!r}: {', '.join(table)}")
        raise ValueError(f"no {program} command is called {name!r}; {suggestion(name, table)}")
    return table[name].load()(rest)


def help_text(program: str, table: Mapping[str, Command], head: str, foot: str) -> str:
    margin = max(map(len, table)) + 2
    rows = "\n".join(f"  {name:{margin}}{command.summary}" for name, command in table.items())
    return "\n\n".join(part for part in (f"usage: {program} COMMAND ...", head, f"commands:\n{rows}", foot) if part)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of at most `WIDTH` columns, with defaults; the usage line leaves out options, which are listed below it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(WIDTH, get_terminal_size().columns))

    def _get_help_string(self, action):
        said = super()._get_help_string(action) or ""
        is_plain = isinstance(action.default, int | float | str) and action.default is not argparse.SUPPRESS
        return f"{said} (default %(default)s)" if is_plain and action.default and "default" not in said else said

    def add_usage(self, usage, actions, groups, prefix=None):
        needed = [action for action in actions if action.required or not action.option_strings]
        others = [] if len(list(actions)) == len(needed) else [argparse.Action([], "", nargs="?", metavar="OPTIONS")]
        super().add_usage(usage, [*needed, *others], [], prefix)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and whose errors are ValueErrors of one sentence.

    The description is filled to `WIDTH` columns. An example is a line, or a pair of a line and what it does.
    """

    def __init__(self, prog: str, description: str, *, examples: Sequence[str | tuple[str, str]] = (), **more) -> None:
        shown = [example if isinstance(example, str) else f"{example[0]}\n      {example[1]}" for example in examples]
        super().__init__(
            prog=prog,
            description=textwrap.fill(" ".join(description.split()), WIDTH),
            epilog="\n  ".join(["examples:", *shown]) if shown else None,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
            **more,
        )
        # argparse itself would name the type.
        self.register("type", int, whole_number)
        self.register("type", float, number)

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        options, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            name = word.partition("=")[0]
            if name.startswith("--"):
                # Dashes, which all options have, bring none nearer.
                near = nearest(name[2:], [option[2:] for option in self._option_string_actions], 0.5)
                hint = f"did you mean {f'--{near}'!r}?" if near else f"{self.prog} --help says what it takes"
                raise ValueError(f"no option of {self.prog} is called {name!r}; {hint}")
            raise ValueError(f"{self.prog} has no use for {word!r}; {self.prog} --help says what it takes")
        return options

    def print_help(self, file=None):
        # argparse itself says nothing of a file that takes no more.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def whole_number(word: str) -> int:
    """The number that a word of the command line is. Raises: ArgumentTypeError if it is none."""
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number") from None


def number(word: str) -> float:
    """As `whole_number`, of any number."""
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no number") from None


def counted(count: int, what: str) -> str:
    """A count with its noun, in the singular for one."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def plain_number(value: float) -> float | None:
    """Round to the digits that fp32 has; None for infinity, which JSON cannot express."""
    return float(f"{value:.8g}") if math.isfinite(value) else None


def print_json(value: object) -> None:
    """Print one JSON document; numbers that JSON cannot express are an error."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def print_table(cells: Sequence[Sequence[str]]) -> None:
    """Print rows of cells, the head first, in columns; all columns but the first hold numbers."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *numbers]))


def refuse_to_overwrite(
    path: Path, *, force: bool = False, otherwise: str = "give another name, or --force to replace it"
) -> None:
    """Make sure that a file may be written.

    Raises: ValueError if it exists and `force` is not given, `otherwise` saying what to do, or if there is no folder
        for it.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path.exists() and not force:
        raise ValueError(f"{path} exists already and was left as it is; {otherwise}")


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all.

    Raises: ValueError as `refuse_to_overwrite` does; OSError with the path, such as that of a full disk.
    """
    refuse_to_overwrite(path, force=force)
    with whole_file(path) as new:
        new.write_text(text, encoding="utf-8")


def _holds(is_ours: Callable[[Any], bool], line: bytes) -> bool:
    try:
        return is_ours(parse_json(line))
    except ValueError:
        return False


class Unfinished:
    """A file that takes long to write: line by line under a hidden name, and under its own once it is complete.

    A call with the same `digest` finds the lines that a killed call left. Another digest gives another hidden name, so
    lines of different calls never mix.

    Raises: ValueError if the file cannot be written, or another call is writing it. What fails later, such as a write
        to a full disk, is an OSError with `path`.
    """

    #: the file's name once it is complete, and until then
    path: Path
    hidden: Path
    #: the open file, which is locked
    _file: Any

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.hidden = path, path.with_name(f".{path.name}.{digest}.unfinished")
        try:
            # A link that somebody has put there could lead anywhere.
            check_file(self.hidden)
            descriptor = os.open(self.hidden, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            self._file = os.fdopen(descriptor, "a+b")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path} is being written by another call; wait, or give another --output") from None

    def lines(self, is_ours: Callable[[Any], bool]) -> list[bytes]:
        """The complete lines up to the first that is not JSON of which `is_ours` holds; the last may be cut short."""
        self._file.seek(0)
        return list(takewhile(lambda line: line.endswith(b"\n") and _holds(is_ours, line), self._file))

    def keep(self, lines: Iterable[bytes]) -> None:
        """Truncate the file to these lines, with which it begins."""
        with naming(self.path):
            self._file.truncate(sum(map(len, lines)))

    def append(self, lines: Iterable[str], *, to_disk: bool) -> None:
        """Add lines, which survive the death of the process and, with `to_disk`, that of the machine."""
        with naming(self.path):
            for line in lines:
                self._file.write(line.encode() + b"\n")
            self._file.flush()
            if to_disk:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let another call continue the file."""
        with naming(self.path):
            self._file.close()

    def publish(self, lines: Iterable[bytes] | None = None) -> None:
        """Give the file its name, with `lines` in place of its own if they are given.

        Raises: ValueError if a file of that name exists by now; the lines stay in the hidden file.
        """
        whole = self.hidden if lines is None else self.hidden.with_suffix(".whole")
        with naming(self.path):
            try:
                if lines is not None:
                    with whole.open("wb") as file:
                        file.writelines(lines)
                        file.flush()
                        os.fsync(file.fileno())
                self._file.close()
                # Unlike a rename, a link never takes another file's place.
                os.link(whole, self.path)
            except FileExistsError:
                raise ValueError(f"{self.path} exists by now; what should stand there is in {self.hidden}") from None
            finally:
                if whole != self.hidden:
                    whole.unlink(missing_ok=True)
            self.hidden.unlink()


def unfinished_of(path: Path) -> list[Path]:
    """The hidden files of calls that were to write this file, with any digest."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"))


# ---- Completion of commands and options in a shell, as shtab writes it from the commands' own parsers


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

    from penstock.schedule import names

    shown = action.metavar if isinstance(action.metavar, str) else ""
    is_schedule = action.dest == "name" and not action.option_strings
    # Most schedules that are to be proved lie in files.
    if action.type is Path or (is_schedule and program.endswith(" verify")):
        action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    elif is_schedule or action.dest == "schedule.name":
        action.choices = names()
    elif action.choices is None and shown.startswith("{"):
        action.choices = shown.strip("{}").split(",")
