"""What a page names in inline code: options that no parser takes, and settings that are not declared."""

import argparse
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser

from penstock import schedule
from penstock.cli.main import COMMANDS
from penstock.cli.options import Command
from penstock.settings import SETTINGS

ROOT = Path(__file__).parents[2]
# What pages name of others: Slurm's, py-spy's, and that of `penstock` and every parser itself.
OTHERS = {"--signal", "--kill-on-bad-exit", "--pid", "--help", "--version"}
# A placeholder, as in `--section.name VALUE`.
PLACEHOLDER = "section.name"
FILES = {"csv", "json", "jsonl", "py", "toml", "yaml"}
SECTIONS = {setting.section for setting in SETTINGS.values()} - {""}
OPTION = re.compile(r"(?<![\w-])--([a-z][\w.-]*)")
SETTING = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z]\w*)(?![\w./(])")


def unknown_in(text: str) -> list[str]:
    """Every option and setting that the inline code of a page's Markdown names and that does not exist."""
    return [name for code in inline_codes(text) for name in _unknown(code)]


def inline_codes(text: str) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def _unknown(code: str) -> Iterator[str]:
    for name in OPTION.findall(code):
        known = name == PLACEHOLDER or name.replace("-", "_") in SETTINGS or f"--{name}" in options()
        if not known:
            yield f"--{name}"
    for name in SETTING.findall(code):
        section, _, key = name.partition(".")
        # A package bears the name of a section, and so may a file.
        no_setting = key in FILES or (section == "schedule" and key in schedule.__all__)
        if name not in SETTINGS and not no_setting:
            yield name


@cache
def options() -> frozenset[str]:
    """Every option of torchrun, of Penstock's commands and schedules, and of the scripts of this repository."""
    parsers = [get_args_parser(), *(command.parser() for command in _commands(COMMANDS))]
    taken = {option for parser in parsers for one in _with_inner(parser) for option in one._option_string_actions}
    scripts = [path for folder in ("examples", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    taken.update(*(re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text()) for path in scripts))
    own = {f"--{key.replace('_', '-')}" for name in schedule.names() for key in schedule.options(name)}
    return frozenset(taken | own | OTHERS)


def _commands(table: Mapping[str, Command]) -> Iterator[Command]:
    for command in table.values():
        inner = getattr(import_module(command.module), "COMMANDS", None)
        if inner and command not in inner.values():
            yield from _commands(inner)
        else:
            yield command


def _with_inner(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its own commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
