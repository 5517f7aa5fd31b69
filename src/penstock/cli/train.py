"""`penstock train [RUN.toml]`: reads and checks the settings, then starts the run's workers, or becomes one of them.

Every setting of the file can also be given on the command line, by its name.
"""

import dataclasses
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile

from penstock.cli.commands import WIDTH, Parser
from penstock.cli.options import add_options
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.meeting import Group, find_group
from penstock.cli.processes.memory_limits import check_training
from penstock.cli.progress import show_log
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.runs import check_folder
from penstock.settings import SETTINGS, ConfigError, RunConfig, check_world
from penstock.settings.declare import nearest
from penstock.settings.run import from_values, from_words, read_values, section_summaries, unknown_setting

# ---- The options of `penstock train`: its switches and every setting, with help that shows a section at a time


#: what most runs set, in the overview
_COMMON = (
    *("output", "model.pretrained", "model.hidden_size", "model.num_layers"),
    *("data.corpus", "data.validation_corpus", "data.tokenizer", "data.sequence_length", "data.num_sequences"),
    *("parallel.pp", "parallel.dp", "parallel.device", "schedule.name", "optimizer.learning_rate"),
    *("train.steps", "train.num_microbatches", "train.precision"),
)
_DESCRIPTION = """Train a model cut into pipeline stages. RUN.toml sets what the run does, section by section; each
setting can also be given here, and then takes the place of the file's. Every setting has a default."""
_EXAMPLES = (
    ("penstock train examples/tiny.toml --dry-run", "show layout, stages, schedule and memory, start nothing"),
    ("penstock train examples/tiny.toml --train.steps 200", "train, or continue from the newest checkpoint"),
    ("penstock train --model.pretrained folder --data.corpus chat.jsonl", "fine-tune a model of Hugging Face's"),
    ("penstock train --help optimizer", "the settings of a section"),
)


def _switch(help: str) -> bool:
    return dataclasses.field(default=False, metadata={"help": help})


@dataclass(frozen=True)
class Switches:
    """The switches of one call of the command, which are not settings of the run."""

    dry_run: bool = _switch("print layout, stages, schedule and memory, and start nothing")
    resume: bool = _switch("refuse to start anew: there must be a checkpoint to continue from")
    fresh: bool = _switch("refuse to continue: the output folder must hold no run")
    json: bool = _switch("print the result as JSON, and progress to standard error")


SWITCHES = {own.name: own.metadata["help"] for own in dataclasses.fields(Switches)}


def parser() -> Parser:
    """The parser of `penstock train`, with every setting."""
    return _parser_of(SETTINGS)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether the arguments ask for help, of whatever."""
    return bool({"-h", "--help", "--help-all"} & set(argv))


def train_help(argv: Sequence[str]) -> str:
    """The help that the arguments ask for: the overview, or that of the sections and settings after ``--help``.

    Raises:
        ConfigError: no section or setting is called so; the nearest one is named.
    """
    if "--help-all" in argv:
        return parser().format_help()
    asked = next(place for place, word in enumerate(argv) if word in ("-h", "--help"))
    names = list(takewhile(lambda word: not word.startswith("-"), argv[asked + 1 :]))
    if not names:
        return _overview()
    found = [setting for name in names for setting in _settings_of(name.removeprefix("--").replace("-", "_"))]
    return _parser_of(found, switches=False).format_help()


def _settings_of(name: str) -> list[str]:
    found = [own.name for own in SETTINGS.values() if name in (own.section, own.name)]
    if not found:
        sections = section_summaries()
        near = nearest(name, SETTINGS if "." in name else sections)
        raise ConfigError(
            f"no section or setting is called {name!r}; the nearest one is {near}, and the sections are "
            f"{', '.join(sections)}"
        )
    return found


def _parser_of(names: Iterable[str], *, switches: bool = True) -> Parser:
    """The parser with these settings, a group for each section."""
    found, summaries = _empty(switches), section_summaries()
    for section, own in groupby(names, lambda name: SETTINGS[name].section):
        group = found.add_argument_group(f"[{section}]", summaries[section]) if section else found
        add_options(group, {name: SETTINGS[name] for name in own})
    return found


def _overview() -> str:
    found = _empty(switches=True)
    add_options(found.add_argument_group("settings that most runs give"), {name: SETTINGS[name] for name in _COMMON})
    rows = [
        textwrap.fill(f"{section:12}{summary}", WIDTH - 2, subsequent_indent=" " * 12)
        for section, summary in section_summaries().items()
    ]
    found.add_argument_group("sections", "\n".join(rows))
    return found.format_help()


def _empty(switches: bool) -> Parser:
    found = Parser("penstock train", _DESCRIPTION, examples=_EXAMPLES, add_help=False)
    found.add_argument("run", nargs="?", metavar="RUN.toml", help="the settings of the run")
    found.add_argument(
        *("-h", "--help"), nargs="*", metavar="SECTION", help="show this overview, or a section's settings, and exit"
    )
    found.add_argument("--help-all", action="store_true", help="show all settings and exit")
    for name, help in SWITCHES.items() if switches else ():
        found.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=help)
    return found


# ---- `penstock train [RUN.toml]`: reads and checks the settings, then starts the run's workers, or becomes one of them


# The first optimizer of a process imports dynamo.
_COMMAND = WorkerCommand(
    "penstock.cli.train",
    "continues from the newest checkpoint",
    ("penstock.cli.train_worker", "torch._dynamo", "torch.distributed.checkpoint"),
)


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of one call: the file's settings, changed by those of the command line."""

    config: RunConfig = field(default_factory=RunConfig)
    switches: Switches = field(default_factory=Switches)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError: the settings, the data or the output folder cannot be used; nothing has been started or written.
    """
    arguments = read_arguments(argv)
    dry, given, group = arguments.switches.dry_run, arguments.config, find_group(os.environ)
    # Workers that we launch ourselves follow a process that has said so.
    speaks = group is None or (group.rank == 0 and not group.is_ours)
    show_log("INFO" if speaks else "ERROR")
    config = with_pretrained(given)
    if group is not None and not dry:
        config = config.fit(group.world_size)
    config = check_run(config, proves=not dry, refuse_sizes=partial(_refuse_sizes, group))
    arguments = replace(arguments, config=config)
    if speaks:
        _show_layers(given, config)
    if dry:
        from penstock.cli.dry_run import show_dry_run

        show_dry_run(config, as_json=arguments.switches.json)
        return 0
    if group is not None:
        return _work(arguments, group)
    check_folder(config, fresh=arguments.switches.fresh, resume=arguments.switches.resume)
    if config.parallel.world_size == 1:
        return _work(arguments, Group.alone())
    command = replace(_COMMAND, shutdown_timeout_s=config.parallel.shutdown_timeout_s)
    return launch(command, argv, config.parallel.world_size, config.parallel.num_threads, check=lambda: _look(config))


def _refuse_sizes(group: Group | None, config: RunConfig) -> None:
    """Refuse another number of processes than there is, and what this machine cannot hold if it holds all of them."""
    if group is not None:
        check_world(config, group.world_size, group.origin)
    if group is None or group.is_on_one_host:
        check_training(config)


def _show_layers(given: RunConfig, config: RunConfig) -> None:
    """Say on standard error where transformers' own layers run the model without having been asked for, and why."""
    if config.model.native is not False or given.model.native is False:
        return
    from penstock.engine.folders.model_folder import open_folder

    folder = given.model.pretrained or ""
    reason = open_folder(folder, given.model.native).transformers_because
    print(f"penstock: transformers' own layers run {folder}: {reason}", file=sys.stderr)


def _look(config: RunConfig) -> None:
    from penstock.engine.folders.run_parts import check_parts

    check_parts(config)


def _work(arguments: TrainArguments, group: Group) -> int:
    from penstock.cli.train_worker import TrainWorker

    switches = arguments.switches
    return TrainWorker(arguments.config, group, switches.resume, switches.fresh, switches.json).run()


def read_arguments(argv: Sequence[str]) -> TrainArguments:
    """Read ``[RUN.toml] [--switch ...] [--section.key value ...]``; ``--help`` prints help and exits.

    Raises:
        ConfigError: no file, an unknown name (the nearest known one is named), or a value of a wrong type or out of
            bounds.
    """
    if asks_for_help(argv):
        print(train_help(argv))
        raise SystemExit(0)
    if not argv or (argv[0].startswith("-") and not argv[0].startswith("--")):
        raise ConfigError(
            "penstock train takes the path of a run's TOML file, such as examples/tiny.toml, or settings alone, "
            "such as --model.pretrained FOLDER --data.corpus FILE"
        )
    has_file = not argv[0].startswith("--")
    values, switches = read_values(argv[0]) if has_file else {}, set()
    for flag, *words in _groups(argv[has_file:]):
        name = flag.removeprefix("--").replace("-", "_")
        if name in SETTINGS:
            values[name] = from_words(SETTINGS[name], words)
        elif name not in SWITCHES:
            if "." in name:
                raise unknown_setting(name)
            known = [f"--{other}".replace("_", "-") for other in [*SWITCHES, *SETTINGS]]
            raise ConfigError(f"there is no {flag}; the nearest one is {nearest(flag, known)}")
        elif words:
            raise ConfigError(f"{flag} is a switch and takes no value, but {words[0]!r} follows it")
        else:
            switches.add(name)
    if {"resume", "fresh"} <= switches:
        raise ConfigError("--resume and --fresh exclude each other; without either a run is continued if there is one")
    return TrainArguments(from_values(values), Switches(**dict.fromkeys(switches, True)))


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
