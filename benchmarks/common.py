"""The frame of each benchmark, `python -m benchmarks.NAME`: its options, what it prints, and its exit code."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from benchmarks.ranks import RankFailed
from penstock.cli.main import run_as_script
from penstock.cli.options import Parser
from penstock.cli.output import print_json

T = TypeVar("T")


def main(name: str, words: list[str] | None = None) -> int:
    """Run `benchmarks.NAME`, which has a `parser`, a `measure` of its options and maybe a `show` of the result.

    Returns: the exit code; 2 for a mistake in the words, 1 if a process of the benchmark failed.
    """
    # By its own name and not as __main__, so that its processes find the same classes.
    return run_as_script(partial(_run, import_module(f"benchmarks.{name}")), words)


def _run(benchmark: ModuleType, words: list[str]) -> int:
    parser: Parser = benchmark.parser()
    for action in parser._actions:
        if action.help and action.default not in (None, False, argparse.SUPPRESS):
            default = action.default if isinstance(action.default, (list, tuple)) else [action.default]
            action.help += f" (default: {' '.join(map(str, default))})"
    given = parser.parse_args(words)
    try:
        result = benchmark.measure(given)
    except RankFailed as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    if given.json:
        print_json(result)
    else:
        getattr(benchmark, "show", show)(result)
    return 0


def new_parser(name: str, description: str | None, *examples: str) -> Parser:
    """The parser of `benchmarks.NAME`, which has no option but --json yet; each example is its words."""
    program = f"python -m benchmarks.{name}"
    parser = Parser(program, description or "", examples=[f"{program} {words}".rstrip() for words in ("", *examples)])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def options_of(kind: type[T], given: argparse.Namespace) -> T:
    """The dataclass whose fields, but for those with a default of its own, are options of the same names."""
    return kind(**{field.name: getattr(given, field.name) for field in fields(kind) if hasattr(given, field.name)})  # type: ignore[arg-type]


def progress(text: str) -> None:
    """Print a line on how far the benchmark has come."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range, as every benchmark reports them."""
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


def show(result: Any, indent: str = "") -> None:
    """Print names and numbers, a line each."""
    if isinstance(result, list):
        for found in result:
            show(found, indent)
            print()
        return
    for name, value in result.items():
        if isinstance(value, dict) and set(value) == {"median", "range"}:
            print(f"{indent}{name}: {_text(value['median'])} ({_text(value['range'])})")
        elif isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            print(f"{indent}{name}:")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name}: {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, list):
        floats = any(isinstance(v, float) for v in value)
        return (" to " if floats else " ").join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
