"""The command line of `penstock train`: the run's file, a few switches, and every setting of the file by its name."""

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, get_args

from penstock.engine.config import RunConfig
from penstock.engine.config_file import ConfigError, describe, nearest, read_config, setting_types, unknown_setting


@dataclass(frozen=True)
class Switches:
    """What one call of the command is to do; none of it belongs to the run."""

    dry_run: bool = False
    """Print layout, stages, schedule and memory, and start nothing."""
    resume: bool = False
    """Refuse to start anew: there must be a checkpoint to continue from."""
    fresh: bool = False
    """Refuse to continue: the output folder must hold no run."""
    json: bool = False
    """Print the result as JSON, and progress to standard error."""


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of one call: what stands in the file, changed by what stands on the command line."""

    config: RunConfig = field(default_factory=RunConfig)
    switches: Switches = field(default_factory=Switches)


def read_arguments(argv: Sequence[str]) -> TrainArguments:
    """Read ``RUN.toml [--switch ...] [--section.key value ...]``; ``--help`` prints all settings and exits.

    Raises:
        ConfigError: no file, an unknown name (the nearest known one is told) or a value of a wrong type.
    """
    if {"-h", "--help"} & set(argv):
        _parse(RunConfig(), ["--help"])
    if not argv or argv[0].startswith("-"):
        raise ConfigError("penstock train takes the path of a run's TOML file first, such as examples/tiny.toml")
    config = read_config(argv[0])
    groups = [_in_tyros_words(group) for group in _groups(argv[1:])]
    try:
        arguments = _parse(config, [word for group in groups for word in group])
    except SystemExit:
        raise _blame(groups) from None
    if arguments.switches.resume and arguments.switches.fresh:
        raise ConfigError("--resume and --fresh exclude each other; without either a run is continued if there is one")
    return arguments


def _parse(config: RunConfig, words: Sequence[str]) -> TrainArguments:
    import tyro

    kind = dataclasses.make_dataclass(
        "Arguments",
        [
            ("switches", Annotated[Switches, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]),
            ("config", Annotated[RunConfig, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]),
        ],
    )
    # tyro's own message is a box of many lines; the caller says it in a sentence.
    quiet = contextlib.nullcontext() if "--help" in words else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        parsed: Any = tyro.cli(
            kind,
            default=kind(switches=Switches(), config=config),
            args=list(words),
            prog="penstock train RUN.toml",
            description="Train a model cut into pipeline stages.",
            use_underscores=True,
        )
    return TrainArguments(parsed.config, parsed.switches)


def _groups(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values; ``--name=value`` is split."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            groups.append([name, value] if equals else [name])
        elif not groups:
            raise ConfigError(f"{word!r} stands after the run's file; settings are given as --section.key value")
        else:
            groups[-1].append(word)
    return groups


def _in_tyros_words(group: list[str]) -> list[str]:
    """A known flag with its values spelt as tyro expects them (True, None); an unknown one is refused here."""
    flag, *values = group
    name = flag.removeprefix("--").replace("-", "_")
    if name in _switch_names():
        if values:
            raise ConfigError(f"{flag} is a switch and takes no value, but {values[0]!r} follows it")
        return [f"--{name}"]
    annotation = setting_types().get(name)
    if annotation is None:
        if "." in name:
            raise unknown_setting(name)
        known = [f"--{other}".replace("_", "-") for other in [*_switch_names(), *setting_types()]]
        raise ConfigError(f"there is no {flag}; the nearest one is {nearest(flag, known)}")
    spelt = {"none": "None"} if NoneType in get_args(annotation) else {}
    if annotation is bool:
        spelt |= {"true": "True", "false": "False"}
    return [f"--{name}", *(spelt.get(value, value) for value in values)]


def _switch_names() -> list[str]:
    return [switch.name for switch in dataclasses.fields(Switches)]


def _blame(groups: Sequence[list[str]]) -> ConfigError:
    """The error for the first flag that is not understood even alone."""
    for flag, *values in groups:
        try:
            _parse(RunConfig(), [flag, *values])
        except SystemExit:
            name = flag.removeprefix("--")
            given = repr(" ".join(values)) if values else "nothing"
            return ConfigError(f"{name} takes {describe(setting_types()[name])}, not {given}")
    return ConfigError(f"{' '.join(word for group in groups for word in group)} can not be given together")
