"""`penstock train [RUN.toml]`: reads and checks the settings, then starts the run's workers, or becomes one of them.

Every setting of the file can also be given on the command line, by its name.
"""

import argparse
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, takewhile
from typing import get_origin

from penstock.cli.options import WIDTH, Parser, add_options, given_of
from penstock.cli.output import show_log
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.machine import check_training
from penstock.cli.processes.meeting import Group, find_group
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.runs import check_folder, writes_tensorboard
from penstock.settings import SETTINGS, ConfigError, RunConfig
from penstock.settings.declare import nearest, parts_of
from penstock.settings.run import from_values, read_values, section_summaries

#: what most runs set, in the overview
_COMMON = (
    *("output", "model.pretrained", "model.hidden_size", "model.num_layers"),
    *("data.corpus", "data.validation_corpus", "data.tokenizer", "data.sequence_length", "data.num_sequences"),
    *("parallel.pp", "parallel.dp", "parallel.device", "schedule.name", "optimizer.learning_rate"),
    *("train.steps", "train.num_microbatches", "train.precision"),
)
_SWITCHES = {
    "--dry-run": "print layout, stages, schedule and memory, and start nothing",
    "--resume": "refuse to start anew: there must be a checkpoint to continue from",
    "--fresh": "refuse to continue: the output folder must hold no run",
    "--json": "print the result as JSON, and progress to standard error",
}
_DESCRIPTION = """Train a model cut into pipeline stages. RUN.toml sets what the run does, section by section; each
setting can also be given here, and then takes the place of the file's. Every setting has a default."""
_EXAMPLES = (
    ("penstock train examples/tiny.toml --dry-run", "show layout, stages, schedule and memory, start nothing"),
    ("penstock train examples/tiny.toml --train.steps 200", "train, or continue from the newest checkpoint"),
    ("penstock train --model.pretrained folder --data.corpus chat.jsonl", "fine-tune a model of Hugging Face's"),
    ("penstock train --help optimizer", "the settings of a section"),
)


def parser(names: Iterable[str] = SETTINGS, *, switches: bool = True) -> Parser:
    parser = Parser("penstock train", _DESCRIPTION, examples=_EXAMPLES, add_help=False)
    parser.add_argument("run", nargs="?", metavar="RUN.toml", help="the settings of the run")
    parser.add_argument(
        *("-h", "--help"), nargs="*", metavar="SECTION", help="show this overview, or a section's settings, and exit"
    )
    parser.add_argument("--help-all", action="store_true", help="show all settings and exit")
    for switch, text in _SWITCHES.items() if switches else ():
        parser.add_argument(switch, action="store_true", help=text)
    summaries = section_summaries()
    for section, of_section in groupby(names, lambda name: SETTINGS[name].section):
        group = parser.add_argument_group(f"[{section}]", summaries[section]) if section else parser
        add_options(group, {name: SETTINGS[name] for name in of_section}, nargs="*")
    return parser


def train_help(argv: Sequence[str]) -> str:
    """The help that the arguments ask for: the overview, or that of the sections and settings after ``--help``.

    Raises:
        ConfigError: no section or setting is called so; the nearest one is named.
    """
    if "--help-all" in argv:
        return parser().format_help()
    asked = next(place for place, word in enumerate(argv) if word in ("-h", "--help"))
    sections, names = section_summaries(), []
    for word in takewhile(lambda word: not word.startswith("-"), argv[asked + 1 :]):
        name = word.replace("-", "_")
        of_word = [setting.name for setting in SETTINGS.values() if name in (setting.section, setting.name)]
        if not of_word:
            near = nearest(name, SETTINGS if "." in name else sections)
            raise ConfigError(
                f"no section or setting is called {name!r}; the nearest one is {near}, and the sections are "
                f"{', '.join(sections)}"
            )
        names += of_word
    if names:
        return parser(names, switches=False).format_help()
    overview = parser(())
    common = {name: SETTINGS[name] for name in _COMMON}
    add_options(overview.add_argument_group("settings that most runs give"), common, nargs="*")
    rows = [
        textwrap.fill(f"{section:12}{summary}", WIDTH - 2, subsequent_indent=" " * 12)
        for section, summary in sections.items()
    ]
    overview.add_argument_group("sections", "\n".join(rows))
    return overview.format_help()


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read ``[RUN.toml] [--switch ...] [--section.key value ...]``; ``--help`` prints help and exits.

    Returns: the switches by name, and as `config` the file's settings, changed by those of the command line.

    Raises:
        ConfigError: no file, an unknown name (the nearest known one is named), or a value of a wrong type or out of
            bounds.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        print(train_help(argv))
        raise SystemExit(0)
    given = parser().parse_args(argv)
    for name, setting in SETTINGS.items():
        words, is_list = getattr(given, name), any(get_origin(part) is tuple for part in parts_of(setting.type))
        # An option takes all words that follow: the file may be the second of one that has one value.
        if given.run is None and not is_list and words and len(words) == 2 and words[1].endswith(".toml"):
            given.run = words.pop()
    if given.resume and given.fresh:
        raise ConfigError("--resume and --fresh exclude each other; without either a run is continued if there is one")
    values = given_of(given, SETTINGS, lambda setting: setting.name)
    if given.run is None and not values:
        raise ConfigError(
            "penstock train takes the path of a run's TOML file, such as examples/tiny.toml, or settings alone, "
            "such as --model.pretrained FOLDER --data.corpus FILE"
        )
    given.config = from_values(({} if given.run is None else read_values(given.run)) | values)
    return given


# The first optimizer of a process imports dynamo.
_COMMAND = WorkerCommand(
    "penstock.cli.train",
    "continues from the newest checkpoint",
    ("penstock.cli.processes.train_worker", "torch._dynamo"),
)


def main(argv: Sequence[str]) -> int:
    given = read_arguments(argv)
    dry, asked, group = given.dry_run, given.config, find_group(os.environ)
    # Workers that we launch ourselves follow a process that has said so.
    speaks = group is None or (group.rank == 0 and not group.is_ours)
    show_log("INFO" if speaks else "ERROR")
    config = with_pretrained(asked)
    if group is not None and not dry:
        config = config.fit(group.world_size)
    config = check_run(config, proves=not dry, refuse_sizes=partial(_refuse_sizes, group))
    if speaks and config.model.native is False and asked.model.native is not False:
        from penstock.cli.models.session import show_layers
        from penstock.engine.folders.model_folder import open_folder

        show_layers(open_folder(asked.model.pretrained or "", asked.model.native))
    if config.train.epochs is not None:
        from penstock.engine.folders.run_parts import with_steps

        config = with_steps(config)
    if dry:
        from penstock.cli.dry_run import show_dry_run

        show_dry_run(config, as_json=given.json)
        return 0
    writes_tensorboard(config.log)
    if group is None:
        check_folder(config, fresh=given.fresh, resume=given.resume)
        parallel = config.parallel
        if parallel.world_size > 1:
            from penstock.engine.folders.run_parts import check_parts

            command = replace(_COMMAND, shutdown_timeout_s=parallel.shutdown_timeout_s)
            return launch(command, argv, parallel.world_size, parallel.num_threads, lambda: check_parts(config))
    from penstock.cli.processes.train_worker import train_worker

    return train_worker(config, group or Group.alone(), given.resume, given.fresh, given.json)


def _refuse_sizes(group: Group | None, config: RunConfig) -> None:
    """Refuse another number of processes than there is, and what this machine cannot hold if it holds all of them."""
    if group is not None:
        config.parallel.check(group.world_size)
    if group is None or group.is_on_one_host:
        check_training(config)
