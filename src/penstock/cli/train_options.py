"""The options of `penstock train`: its switches and every setting, with help that shows a section at a time."""

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from penstock.cli.commands import WIDTH, Parser
from penstock.cli.setting_options import add_options
from penstock.settings import SETTINGS, ConfigError
from penstock.settings.declare import nearest
from penstock.settings.read import section_summaries

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


def help_text(argv: Sequence[str]) -> str:
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
