"""The parts of a run, made from its settings: its engine's arguments, and all of them checked."""

from dataclasses import replace
from math import ceil
from pathlib import Path

from penstock.data import DataShard, MicroBatchSpec
from penstock.data.tokenizer import load_tokenizer
from penstock.engine.checkpoint.manifest import published
from penstock.engine.cut import cut_units
from penstock.engine.folders.model_folder import open_folder
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.runs import CHECKPOINT_FOLDER, tokenizer_of
from penstock.engine.options import EngineArguments, EngineOptions
from penstock.engine.run_data import RunData
from penstock.model import ModelGroups, decoder_units
from penstock.settings import RunConfig, check_rates, checked, read_config


@checked
def arguments_of_run(config: RunConfig | str | Path) -> EngineArguments:
    """The engine's arguments for a run's settings or their TOML file. Raises: ValueError for impossible settings."""
    settings = with_steps(check_run(with_pretrained(read_config(config) if isinstance(config, str | Path) else config)))
    tokenizer = load_tokenizer(tokenizer_of(settings), settings.data.end_token)
    return engine_arguments(settings, tokenizer.vocab_size)


def engine_arguments(config: RunConfig, vocab_size: int) -> EngineArguments:
    """The engine's arguments for settings that have been checked.

    The engine begins with the weights of `model.pretrained`, unless the run has checkpoints to go on from. With such
    weights every process of the layout calls this at the same point.
    """
    source, options = config.model.pretrained, EngineOptions.of(config)
    if config.model.native is False and source is not None:
        # Transformers needs the folder to make the layers, even if their values come from a checkpoint.
        return open_folder(source, native=False, quiet=True).arguments_from_files(config.parallel, options)
    shape = config.model.whole(vocab_size)
    if source is None or published(Path(config.output) / CHECKPOINT_FOLDER):
        return EngineArguments.of_decoder(shape, config.parallel, options)
    return open_folder(source, native=True, quiet=True).arguments_from_files(config.parallel, options, shape)


def with_steps(config: RunConfig) -> RunConfig:
    """The settings of a run with `train.steps` in place of `train.epochs`, counted as transformers and TRL do.

    Raises: ValueError as `RunData.load`, and ConfigError for a warm-up as long as the run.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config
    num_items = RunData.load(config).loader(DataShard(), with_data=False).packing.num_items
    steps = ceil(epochs * ceil(num_items / config.data.num_sequences))
    counted = replace(config, train=replace(config.train, steps=steps, epochs=None))
    check_rates(counted)
    return counted


def check_parts(config: RunConfig) -> RunData:
    """Check all parts of a run without starting anything; returns its data.

    Raises: ValueError if the corpus, the model, its cut or the optimizer is impossible.
    """
    options = EngineOptions.of(config)
    data = RunData.load(config)
    layout = config.parallel
    groups = ModelGroups.planned(tp=layout.tp, cp=layout.cp, ep=layout.ep, form=options.attention)
    if config.model.native is False:
        units = engine_arguments(config, data.corpus.vocab_size).units(groups)
    else:
        units = decoder_units(config.model.whole(data.corpus.vocab_size), groups=groups)
    cut_units(units, options.choice.placement(config.parallel.pp), options)
    return data


def micro_batches(config: RunConfig) -> MicroBatchSpec:
    return MicroBatchSpec(num=config.train.num_microbatches, max_tokens=config.train.max_microbatch_tokens)
