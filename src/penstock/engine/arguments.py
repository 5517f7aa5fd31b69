"""From a run's settings to the arguments of its engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.data.tokenizer import load_tokenizer
from penstock.engine.checkpoint.manifest import published
from penstock.engine.options import EngineOptions
from penstock.engine.pretrained import HuggingFaceForm, open_pretrained
from penstock.engine.run_check import check, with_pretrained
from penstock.engine.runs import CHECKPOINT_FOLDER
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.settings import Layout, ModelConfig, RunConfig, read_config


class EngineArguments(NamedTuple):
    """The arguments with which an `Engine` runs a model that settings or a folder describe."""

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    layout: Layout
    options: EngineOptions
    form: HuggingFaceForm | None


def read_arguments(config: RunConfig | str | Path) -> EngineArguments:
    """The engine's arguments for a run's settings, read from a TOML file or given.

    Raises:
        ValueError: the settings can not go together.
    """
    settings = check(with_pretrained(read_config(config) if isinstance(config, str | Path) else config))
    tokenizer = load_tokenizer(settings.data.tokenizer, settings.data.end_token or False)
    return engine_arguments(settings, tokenizer.vocab_size)


def engine_arguments(config: RunConfig, vocab_size: int, learns: bool = True) -> EngineArguments:
    """The engine's arguments for settings that have been checked.

    It begins with the weights of `model.pretrained`, unless the run has checkpoints to go on from. Where it does, every
    process of the layout calls this at the same point.
    """
    shape = config.model.whole(vocab_size)
    source = config.model.pretrained
    if source is None or published(Path(config.output) / CHECKPOINT_FOLDER):
        units, form = partial(_fresh_units, shape), HuggingFaceForm.of(shape)
    else:
        found = open_pretrained(source, shape=shape)
        units, form = found.units, found.form
    options = replace(EngineOptions.of(config), learns=learns)
    return EngineArguments(units, shape.hidden_size, config.parallel, options, form)


def _fresh_units(shape: ModelConfig, groups: ModelGroups) -> Sequence[UnitSpec]:
    return decoder_units(shape, groups=groups)
