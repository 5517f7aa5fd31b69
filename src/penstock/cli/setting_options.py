"""Options of commands that are settings: type, default, help and bounds come from the declaration."""

import argparse
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from penstock.settings import ModelConfig, ParallelConfig, Setting, Settings, TrainConfig, walk
from penstock.settings.declare import parts_of, possible
from penstock.settings.read import from_words

Options = Mapping[str, Setting]
"""Settings by the names of their options, with underscores."""

_SHORT = {"num_threads": "threads", "timeout_s": "timeout"}
PROCESSES = ("device", "threads", "timeout")


def options_of(settings: Settings, short: Mapping[str, str] | None = None, without: Container[str] = ()) -> Options:
    """The settings of an object, whose values are the defaults; `short` names options otherwise than the setting."""
    return {(short or {}).get(own.key, own.key): own for own in walk(settings) if own.key not in without}


def parallel_options(names: Iterable[str], **defaults: Any) -> Options:
    """The options of these names among those of the layout and of its processes; `defaults` are the command's own."""
    every = options_of(ParallelConfig(), _SHORT)
    return {name: replace(every[name], default=defaults.get(name, every[name].default)) for name in names}


MODEL_OPTIONS: Options = {
    own.key: own
    for own in (*walk(ModelConfig()), *walk(TrainConfig()))
    if own.name in ("model.native", "train.precision")
}
"""The options of a saved model that decide how it is run."""


def add_options(parser: Any, options: Options, metavars: Mapping[str, str] | None = None) -> None:
    """Add an option for each setting; one that is not given is None."""
    for name, own in options.items():
        names = [*possible(own.type), *(("true", "false") if bool in parts_of(own.type) else ())]
        values = "{" + ",".join(names) + "}" if names else "N"
        default = "" if own.default is None else f" (default {own.default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=(metavars or {}).get(name, values),
            help=f"{own.help.rstrip('.')}{default}".replace("%", "%%"),
        )


def values_of(given: argparse.Namespace, options: Options) -> dict[str, Any]:
    """The value of each option by the attribute of its setting; the default where it is not given.

    Raises:
        ConfigError: a value of another type, or out of bounds.
    """
    found = {}
    for name, own in options.items():
        word = getattr(given, name)
        found[own.path[-1]] = own.default if word is None else own.take(from_words(own, [word]))
    return found
