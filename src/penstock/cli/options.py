"""Commands and their options: a parser with one-sentence errors, and options that are settings.

Type, default, help and bounds of a setting come from its declaration.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn, get_origin

from penstock.settings.declare import (
    ConfigError,
    Setting,
    Settings,
    from_words,
    nearest,
    parts_of,
    plain,
    possible,
    suggestion,
    walk_settings,
)

#: columns of every help, which a terminal has at the least
WIDTH = 80


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of at most `WIDTH` columns, with defaults; the usage line leaves out options, which are listed below it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(WIDTH, get_terminal_size().columns))

    def _get_help_string(self, action):
        said = super()._get_help_string(action) or ""
        is_plain = isinstance(action.default, int | float | str) and action.default is not argparse.SUPPRESS
        return f"{said} (default %(default)s)" if is_plain and action.default and "default" not in said else said

    def _format_args(self, action, default_metavar):
        # A setting takes as many words as its type has values, which the help need not repeat.
        of_setting = action.nargs == "*" and action.option_strings and action.dest != "help"
        return str(action.metavar) if of_setting else super()._format_args(action, default_metavar)

    def add_usage(self, usage, actions, groups, prefix=None):
        needed = [action for action in actions if action.required or not action.option_strings]
        others = [] if len(list(actions)) == len(needed) else [argparse.Action([], "", nargs="?", metavar="OPTIONS")]
        super().add_usage(usage, [*needed, *others], [], prefix)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and whose errors are one sentence.

    The description is filled to `WIDTH` columns. An example is a line, or a pair of a line and what it does.
    """

    #: begins a word that is no option
    _negative_number_matcher: re.Pattern[str]

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
        # argparse itself would take other negative numbers than -1 and -0.5 for options.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        options, unknown = self.parse_known_args(self._spelt(args), namespace)
        for word in unknown:
            name = word.partition("=")[0]
            if name.startswith("--"):
                raise self.unknown_option(name)
            raise ConfigError(f"{self.prog} has no use for {word!r}; {self.prog} --help says what it takes")
        return options

    def unknown_option(self, name: str) -> ConfigError:
        """The error for an option that there is not; where options are settings, a key brings the nearest of these."""
        settings = [option for option in self._option_string_actions if "." in option]
        setting = name[2:].replace("-", "_")
        if settings and ("." in name or any(known.endswith(f".{setting}") for known in settings)):
            from penstock.settings.run import unknown_setting

            return unknown_setting(setting)
        # Dashes, which all options have, bring none nearer.
        near = nearest(name[2:], [option[2:] for option in self._option_string_actions], 0.5)
        hint = f"did you mean {f'--{near}'!r}?" if near else f"{self.prog} --help says what it takes"
        return ConfigError(f"no option of {self.prog} is called {name!r}; {hint}")

    def _spelt(self, words: Sequence[str] | None) -> Sequence[str] | None:
        """The words with options as they are declared: hyphens and underscores stand for each other."""
        known = {option.replace("-", "_"): option for option in self._option_string_actions}
        return words and [
            known.get(name.replace("-", "_"), name) + equals + value if word.startswith("--") else word
            for word in words
            for name, equals, value in [word.partition("=")]
        ]

    def print_help(self, file=None):
        # argparse itself says nothing of a file that takes no more.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


# ---- Options that are settings: type, default, help and bounds come from the declaration


Options = Mapping[str, Setting]
"""Settings by the names of their options, with underscores."""

PROCESSES = ("device", "transport", "threads", "timeout")


def options_of(settings: Settings, short: Mapping[str, str] | None = None, without: Container[str] = ()) -> Options:
    """The settings of an object, whose values are the defaults; `short` names options otherwise than the setting."""
    by_key = {setting.key: setting for setting in walk_settings(settings) if setting.key not in without}
    return {(short or {}).get(key, key): setting for key, setting in by_key.items()}


def parallel_options(names: Iterable[str], **defaults: Any) -> Options:
    """The options of these names among those of the layout and of its processes; `defaults` are the command's own."""
    from penstock.settings import ParallelConfig

    every = options_of(ParallelConfig(), {"num_threads": "threads", "timeout_s": "timeout"})
    return {name: replace(every[name], default=defaults.get(name, every[name].default)) for name in names}


def add_options(
    parser: Any,
    options: Options,
    metavars: Mapping[str, str] | None = None,
    chosen: Container[str] = (),
    *,
    switches: bool = False,
    nargs: str | None = None,
) -> None:
    """Add an option for each setting; one that is not given is None. A dotted name stays as it is in files.

    chosen: names of options that the command chooses by itself where none of them is given. switches: a truth value is
    asked for by --name and --no-name. nargs: as argparse has it, of all options; without, a list has one value each
    time that its option is given.
    """
    for name, setting in options.items():
        kinds = parts_of(setting.type)
        names = [*possible(setting.type), *(("true", "false") if bool in kinds and not switches else ())]
        of = f": {', '.join(names)}" if names else ""
        default = plain(setting.default)
        words = setting.default if isinstance(setting.default, tuple) else [default]
        shown = " ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
        form: dict[str, Any] = {"metavar": (metavars or {}).get(name, "X"), "nargs": nargs}
        if setting.type is bool and switches:
            form = {"action": argparse.BooleanOptionalAction, "default": None}
        elif get_origin(setting.type) is tuple and nargs is None:
            form["action"] = "append"
        said = "" if name in chosen or default in (None, (), {}) else f" (default {shown})"
        parser.add_argument(
            f"--{name if '.' in name else name.replace('_', '-')}",
            help=f"{setting.help.rstrip('.')}{of}{said}".replace("%", "%%"),
            **form,
        )


def given_of(
    given: argparse.Namespace, options: Options, key: Callable[[Setting], str] = lambda setting: setting.path[-1]
) -> dict[str, Any]:
    """The value of each option that is given, by the attribute of its setting or by another key.

    Raises: ConfigError for a value of another type, or out of bounds.
    """
    values = {}
    for name, setting in options.items():
        words = getattr(given, name)
        if words is not None:
            words = [words] if isinstance(words, str) else words
            values[key(setting)] = setting.take(from_words(setting, words) if isinstance(words, list) else words)
    return values


def values_of(given: argparse.Namespace, options: Options) -> dict[str, Any]:
    """As `given_of`, with the default of each option that is not given."""
    return {setting.path[-1]: setting.default for setting in options.values()} | given_of(given, options)


def add_output(parser: Parser, what: str, *, option: str = "--output", **more: Any) -> None:
    """Add an option for a file to write, and --force."""
    parser.add_argument(option, type=Path, metavar="FILE", help=what, **more)
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def add_json(parser: Parser, what: str = "print one JSON document instead") -> None:
    parser.add_argument("--json", action="store_true", help=what)


Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class Command:
    """A command's line in the help, and its module, imported on use.

    There `parser()`, or `<function>_parser()`, gives the parser that `main(arguments)` reads its arguments with; that
    returns the exit code, and raises ValueError or OSError for a user's mistake before anything is started or written.
    """

    summary: str
    module: str
    function: str = "main"

    def load(self) -> Main:
        return getattr(import_module(self.module), self.function)

    def parser(self) -> Parser:
        name = "parser" if self.function == "main" else f"{self.function}_parser"
        return getattr(import_module(self.module), name)()


def dispatch(program: str, table: Mapping[str, Command], arguments: list[str], *, head: str, foot: str = "") -> int:
    """Run the command that the first argument names, or print the table of all of them as help.

    Returns: the command's exit code; 2 after help that was not asked for.
    Raises: ValueError naming the nearest command for an unknown name.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        margin = max(map(len, table)) + 2
        rows = "\n".join(f"  {name:{margin}}{command.summary}" for name, command in table.items())
        print(*filter(None, (f"usage: {program} COMMAND ...", head, f"commands:\n{rows}", foot)), sep="\n\n")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in table:
        if name.startswith("-"):
            raise ValueError(f"{program} takes a command before {name!r}: {', '.join(table)}")
        raise ValueError(f"no {program} command is called {name!r}; {suggestion(name, table)}")
    return table[name].load()(rest)
