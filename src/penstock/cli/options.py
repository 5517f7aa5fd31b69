"""Options of commands that are settings: type, default, help and bounds come from the declaration."""

import argparse
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin

from penstock.settings import (
    InferenceConfig,
    ModelConfig,
    ParallelConfig,
    Setting,
    Settings,
    TrainConfig,
    walk_settings,
)
from penstock.settings.declare import is_table, parts_of, plain, possible
from penstock.settings.run import from_words

Options = Mapping[str, Setting]
"""Settings by the names of their options, with underscores."""

_SHORT = {"num_threads": "threads", "timeout_s": "timeout"}
#: columns of possible values that stand in the help's sentence and no longer behind the option
_LONG = 50
PROCESSES = ("device", "threads", "timeout")


def options_of(settings: Settings, short: Mapping[str, str] | None = None, without: Container[str] = ()) -> Options:
    """The settings of an object, whose values are the defaults; `short` names options otherwise than the setting."""
    return {(short or {}).get(own.key, own.key): own for own in walk_settings(settings) if own.key not in without}


def parallel_options(names: Iterable[str], **defaults: Any) -> Options:
    """The options of these names among those of the layout and of its processes; `defaults` are the command's own."""
    every = options_of(ParallelConfig(), _SHORT)
    return {name: replace(every[name], default=defaults.get(name, every[name].default)) for name in names}


MODEL_OPTIONS: Options = {
    # What is left out is as in the model's files.
    own.key: replace(own, default=None) if own.key == "quantize" else own
    for own in (*walk_settings(ModelConfig()), *walk_settings(TrainConfig()), *walk_settings(InferenceConfig()))
    if own.name in ("model.native", "train.precision", "train.reproducible", "inference.quantize")
}
"""The options of a saved model that decide how it is run."""


def add_options(
    parser: Any, options: Options, metavars: Mapping[str, str] | None = None, chosen: Container[str] = ()
) -> None:
    """Add an option for each setting; one that is not given is None. A dotted name stays as it is in files.

    chosen: names of options that the command chooses by itself where none of them is given.
    """
    for name, own in options.items():
        values = (metavars or {}).get(name, _values(own.type))
        of = f": {values.strip('{}').replace(',', ', ')}" if len(values) > _LONG else ""
        parser.add_argument(
            f"--{name if '.' in name else name.replace('_', '-')}",
            metavar="NAME" if of else values,
            help=f"{own.help.rstrip('.')}{of}{'' if name in chosen else _default(own.default)}".replace("%", "%%"),
        )


def _default(value: Any) -> str:
    """The default as it would be given; nothing for one that is empty."""
    if value is None or plain(value) in ((), {}):
        return ""
    words = value if isinstance(value, tuple) else [plain(value)]
    return f" (default {' '.join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)})"


def _values(kind: Any) -> str:
    """A setting's possible values, as its option shows them."""
    names = [*possible(kind), *(("true", "false") if bool in parts_of(kind) else ())]
    if names:
        return "{" + ",".join(names) + "}"
    for part in parts_of(kind):
        if is_table(part) or get_origin(part) is tuple:
            return "TOML" if is_table(part) or is_table(get_args(part)[0]) else "VALUES"
    return "TEXT" if str in parts_of(kind) else "X" if float in parts_of(kind) else "N"


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
