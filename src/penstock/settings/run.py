"""All settings of a run, section by section; those that exclude each other; and the files and words that give them.

An error is one sentence that names the cure."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

from penstock.io.files import parse_toml, read_text
from penstock.settings.data import DataConfig
from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    Bounds,
    ConfigError,
    NamedValue,
    Setting,
    Settings,
    checked,
    nearest,
    plain,
    setting,
    value_of,
    walk_settings,
    with_values,
)
from penstock.settings.layout import ParallelConfig
from penstock.settings.model import AdapterConfig, ModelConfig
from penstock.settings.optimizer import LearningRate, OptimizerConfig
from penstock.settings.schedule import ScheduleConfig

Recompute = Literal["none", "full"] | tuple[int, ...]


class Precision(NamedValue):
    """The dtypes of parameters and compute.

    FP32, FP64: for both. BF16, FP16: 16-bit parameters with fp32 masters; FP16 with a loss scaler. BF16_AUTOCAST: fp32
    parameters, forwards under autocast.

    >>> EngineOptions(precision="bf16").precision is Precision.BF16
    True
    """

    FP32 = "fp32"
    FP64 = "fp64"
    BF16 = "bf16"
    BF16_AUTOCAST = "bf16-autocast"
    FP16 = "fp16"


class Normalize(NamedValue):
    """The divisor of the loss; w are the microbatches' loss weights, usually their numbers of loss tokens.

    GLOBAL: the sum of w over all microbatches and data-parallel ranks. DP: the sum of w on the rank, then the mean
    over ranks. TOKEN_PER_MICROBATCH and MICROBATCH_MEAN: the microbatch's own w, then the mean over microbatches
    and ranks; they differ only where context parallelism splits a microbatch's tokens.

    >>> TrainConfig(normalize="microbatch_mean").normalize is Normalize.MICROBATCH_MEAN
    True
    """

    GLOBAL = "global"
    DP = "dp"
    TOKEN_PER_MICROBATCH = "token_per_microbatch"
    MICROBATCH_MEAN = "microbatch_mean"


class CompileMode(NamedValue):
    """The modes of torch.compile that suit layers of a pipeline."""

    DEFAULT = "default"
    MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class TrainConfig(Settings, section="train"):
    """The training loop.

    >>> TrainConfig(steps=20, precision="bf16", recompute=(0, 1)).normalize is Normalize.GLOBAL
    True
    """

    steps: int = setting(100, "Optimizer steps.", AT_LEAST_1)
    epochs: float | None = setting(
        None,
        "Passes over the text, in place of train.steps; each has as many steps as in transformers and TRL, so that the "
        "last batch of one goes on with the first items of the next.",
        ABOVE_0,
        is_newer=True,
    )
    seed: int = setting(0, "Decides the initial weights and the order of the data.", Bounds(least=0, below=1 << 64))
    precision: Precision | None = setting(
        None,
        "Parameters in fp32, fp64 or 16 bit (with fp32 masters), or fp32 with autocast; left out, that of the model's "
        "files, or fp32. Parameters of your own layers that are not in fp32 keep their dtype.",
    )
    recompute: Recompute = setting(
        "none", 'Activation checkpointing: layers recomputed in backward: "none", "full", or their numbers.', AT_LEAST_0
    )
    num_kept_microbatches: int = setting(
        0,
        "Where layers are recomputed: of the microbatches that a stage has under way, so many keep all activations, "
        "the first ones, and the others alone are recomputed. No stage keeps more at once; in 1F1B it is Megatron's "
        "num_microbatches_with_partial_activation_checkpoints.",
        AT_LEAST_0,
        is_newer=True,
    )
    compile: bool | CompileMode = setting(
        False,
        "Compile each kind of layer with torch.compile: true, or a mode. Layers with collectives stay as they are.",
        is_newer=True,
    )
    reproducible: bool = setting(
        False,
        "Have generation, scoring and training give a token's log-probability the same bits; on CPUs in fp32, with "
        "Penstock's own dense layers.",
        is_newer=True,
    )
    deterministic: bool = setting(
        False,
        "On GPUs, compute with kernels that add up in one order, so that a run that is repeated has the same bits; "
        "slower. On CPUs all kernels do.",
        is_newer=True,
    )
    normalize: Normalize = setting(Normalize.GLOBAL, "The divisor of the loss.")
    num_microbatches: int = setting(
        8,
        "Microbatches that a data-parallel rank cuts its batch into, at least (gradient accumulation); left out, no "
        "more than it has sequences.",
        AT_LEAST_1,
    )
    max_microbatch_tokens: int | None = setting(
        None, "The most tokens of a microbatch; left out, no limit.", AT_LEAST_1
    )


@dataclass(frozen=True)
class CheckpointConfig(Settings, section="checkpoint"):
    """Checkpointing."""

    every: int = setting(100, "Steps between checkpoints; 0 saves only at the end.", AT_LEAST_0)
    keep: int = setting(3, "Number of newest checkpoints to keep.", AT_LEAST_1)
    in_background: bool = setting(True, "Write while training continues.")


@dataclass(frozen=True)
class ValidationConfig(Settings, section="validation"):
    """Validation on held-out text."""

    every: int = setting(100, "Steps between validations; 0 validates only at the end.", AT_LEAST_0)
    num_sequences: int = setting(64, "Sequences of one validation, always the same.", AT_LEAST_1)


@dataclass(frozen=True)
class LogConfig(Settings, section="log"):
    """Logging."""

    every: int = setting(1, "Steps between lines of metrics.", AT_LEAST_1)
    tensorboard: bool | None = setting(None, "Also write for TensorBoard, beside metrics.jsonl: if it is installed.")
    prometheus: bool = setting(False, "Also write the latest numbers to metrics.prom, in Prometheus's text format.")
    wandb: str | None = setting(None, "Also write to this project of Weights & Biases.")
    timeline: bool = setting(
        True, "At the end, draw the last step as measured under the same simulated, if matplotlib is there."
    )


@dataclass(frozen=True)
class WatchConfig(Settings, section="watch"):
    """Callbacks and early stopping."""

    callbacks: tuple[str, ...] = setting(
        (), "Objects whose on_step, on_evaluation, on_checkpoint and on_end are called: package.module:object."
    )
    patience: int | None = setting(
        None, "Validations in a row without a lower loss that end the run; left out, none do.", AT_LEAST_1
    )
    min_delta: float = setting(0.0, "A lower loss is one that is lower by more than this.", AT_LEAST_0)


@dataclass(frozen=True)
class RunConfig(Settings):
    """All settings of a run.

    >>> config = RunConfig(parallel=ParallelConfig(pp=2), schedule=ScheduleConfig("zb-h1"))
    >>> config.flat()["train.steps"], config.parallel.world_size
    (100, 2)
    """

    output: str = setting("runs/penstock", "Folder of the run: checkpoints, metrics, a copy of the settings.")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    adapter: AdapterConfig = AdapterConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    log: LogConfig = LogConfig()
    watch: WatchConfig = WatchConfig()

    def flat(self) -> dict[str, Any]:
        """Plain values under dotted names: ``{"train.steps": 100, ...}``."""
        return {own.name: plain(value_of(self, own.path)) for own in SETTINGS.values()}

    def to_dict(self) -> dict[str, Any]:
        """JSON values, section by section."""
        table: dict[str, Any] = {}
        for own in SETTINGS.values():
            section = table.setdefault(own.section, {}) if own.section else table
            section[own.key] = plain(value_of(self, own.path))
        return table

    def identity(self) -> dict[str, Any]:
        """The settings that decide the numbers of the run, under dotted names; equal ones continue each other.

        Left out are the place of the text, whose tokens are compared when a run goes on, and the cut, logging, saving
        and length of a run: pipeline ranks and schedules do not change a single bit, and tensor- and expert-parallel
        ranks change only rounding. So do data- and context-parallel ranks and microbatches if the loss of a step is
        divided by all its tokens.
        """
        settings = self.flat()
        settings["optimizer.num_decay_steps"] = self.optimizer.num_decay_steps(self.train.steps)
        if isinstance(rate := self.optimizer.learning_rate, LearningRate):
            settings["optimizer.num_warmup_steps"] = rate.warmup(self.train.steps)
        settings["data.tokenizer"] = self.data.tokenizer or self.model.pretrained or "bytes"
        settings["train.precision"] = settings["train.precision"] or Precision.FP32.value
        fixed = frozenset[str]() if self.train.normalize is Normalize.GLOBAL else _FREE_IF_GLOBAL
        added = {name for name, own in SETTINGS.items() if own.is_newer and settings[name] == plain(own.default)}
        if settings["data.special_tokens"] == (settings["data.tokenizer"] == "bytes"):
            # As it was before there was such a setting: bytes have none, and those of other tokenizers were left out.
            added.add("data.special_tokens")
        free = MAY_CHANGE | added
        return {
            name: value
            for name, value in settings.items()
            if name in fixed or not free & {name, name.partition(".")[0]}
        }

    def digest(self) -> str:
        """A hash of `identity`, sixteen hex digits."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fit(self, world_size: int) -> "RunConfig":
        """The settings for a group of `world_size` processes, where `parallel.elastic` allows it; else unchanged.

        The group's size must be a multiple of one pipeline's. A pipeline that takes over the work of others takes more
        microbatches of the same size, so memory stays the same.
        """
        old = self.parallel
        pipeline = old.world_size // old.dp
        dp = world_size // pipeline
        if not old.elastic or dp < 1 or dp * pipeline != world_size:
            return self
        num_microbatches = ceil(self.train.num_microbatches * old.dp / dp)
        return replace(
            self,
            parallel=replace(old, dp=dp),
            train=replace(self.train, num_microbatches=num_microbatches),
        )


SETTINGS: Mapping[str, Setting] = {own.name: own for own in walk_settings(RunConfig())}
"""Every setting of a run by its dotted name, in the order of the file."""

# Settings, or whole sections, that a continued run may change.
_FREE_IF_GLOBAL = frozenset({"parallel.dp", "parallel.cp", "train.num_microbatches", "train.max_microbatch_tokens"})
MAY_CHANGE = _FREE_IF_GLOBAL | {
    *("output", "log", "watch", "checkpoint", "validation", "schedule", "parallel", "optimizer.zero"),
    *("train.steps", "train.epochs", "data.cache", "data.corpus", "data.validation_corpus"),
}


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], here: str = "here", there: str = "there"
) -> list[str]:
    """The names of settings that differ, each with both values: ``train.seed (1 here, 2 there)``."""
    return [
        f"{name} ({ours.get(name)!r} {here}, {theirs.get(name)!r} {there})"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


# ---- settings that exclude each other


def check_sections(config: RunConfig) -> None:
    """Refuse settings of different sections that exclude each other.

    Raises:
        ConfigError: the message names the settings and what would be possible.
    """
    config.model.check_shape()
    for condition, sentence in _EXCLUDING:
        if found := condition(config):
            raise ConfigError(sentence.format(found=found, **vars(config)))


def _no_equal_shares(config: RunConfig) -> str | None:
    """The numbers of tensor-parallel ranks that can share the model, if the layout's cannot."""
    model = config.model
    if model.can_share(config.parallel.tp):
        return None
    return ", ".join(str(n) for n in range(1, model.num_heads + 1) if model.can_share(n))


def _no_equal_batches(config: RunConfig) -> str | None:
    """The nearest numbers of sequences that data-parallel ranks can share, if they cannot share the given one."""
    sequences, dp = config.data.num_sequences, config.parallel.dp
    low = sequences // dp * dp
    return (f"{low} or {low + dp}" if low else str(dp)) if sequences % dp else None


# The conditions under which settings exclude each other, and the sentence about each, in the order of asking. A
# sentence knows the sections by name, and as `found` the value of its condition.
_EXCLUDING: tuple[tuple[Callable[[RunConfig], Any], str], ...] = (
    (
        lambda run: run.model.native is False and run.model.pretrained is None,
        "model.native = false runs a model of transformers; name its folder as model.pretrained",
    ),
    (
        lambda run: run.train.epochs is not None and run.train.steps != TrainConfig().steps,
        "train.steps = {train.steps} and train.epochs = {train.epochs:g} both say how long the run is; leave one out",
    ),
    (
        lambda run: run.model.native is False and run.parallel.cp * run.parallel.tp > 1,
        "parallel.cp = {parallel.cp} x parallel.tp = {parallel.tp} cannot share transformers' own layers, which run "
        "{model.pretrained!r}; parallel.pp and parallel.dp can",
    ),
    (
        lambda run: run.data.sequence_length < run.parallel.cp,
        "data.sequence_length = {data.sequence_length} tokens cannot be shared by parallel.cp = {parallel.cp} ranks; "
        "at most parallel.cp = {data.sequence_length} is possible",
    ),
    (
        lambda run: run.data.sequence_length > run.model.max_length,
        "data.sequence_length = {data.sequence_length} is longer than model.max_length = {model.max_length}; shorten "
        "the one or raise the other",
    ),
    (
        lambda run: run.parallel.ep > max(1, run.model.experts.num_experts),
        "parallel.ep = {parallel.ep} ranks cannot share experts.num_experts = {model.experts.num_experts}; at most as "
        "many ranks as experts can",
    ),
    (
        _no_equal_shares,
        "parallel.tp = {parallel.tp} cannot share {model.num_heads} query heads, {model.key_heads} key heads and an "
        "MLP of model.intermediate_size = {model.intermediate_size} evenly; possible are {found}",
    ),
    (
        _no_equal_batches,
        "data.num_sequences = {data.num_sequences} cannot be shared evenly by parallel.dp = {parallel.dp}; {found} can",
    ),
    (
        lambda run: (
            run.train.num_microbatches * run.parallel.dp > run.data.num_sequences
            and run.data.num_sequences // run.parallel.dp
        ),
        "train.num_microbatches = {train.num_microbatches} is more than the {found} sequences of a data-parallel rank; "
        "at most {found} are possible, or raise data.num_sequences",
    ),
    (
        lambda run: (run.train.max_microbatch_tokens or run.data.sequence_length) < run.data.sequence_length,
        "train.max_microbatch_tokens = {train.max_microbatch_tokens} is less than one sequence of data.sequence_length "
        "= {data.sequence_length}; no sequence is cut, so give at least that",
    ),
    (
        lambda run: run.parallel.elastic and run.train.normalize is not Normalize.GLOBAL,
        "parallel.elastic with train.normalize = {train.normalize.value!r} would learn other things from fewer "
        'processes; "global" is possible',
    ),
)


def check_rates(config: RunConfig) -> None:
    """Refuse a warm-up as long as the run.

    Raises:
        ConfigError: the message names the longest possible warm-up.
    """
    if config.train.epochs is not None:
        # The number of steps is not known yet.
        return
    end = config.optimizer.num_decay_steps(config.train.steps)
    rate = config.optimizer.learning_rate
    warmup = rate.warmup(config.train.steps) if isinstance(rate, LearningRate) else 0
    if end is not None and warmup >= end:
        raise ConfigError(
            f"optimizer.num_warmup_steps = {warmup} leaves nothing of the {end} steps over which "
            f"the learning rate falls; less than {end} are possible"
        )


# ---- Reading settings from TOML


Values = dict[str, Any]
"""Values of settings by their dotted names."""


@checked
def read_config(path: str | Path) -> RunConfig:
    """Read a run's TOML file.

    Raises:
        ConfigError: a missing file, invalid TOML, an unknown key (the nearest one is named), or a value of a wrong
            type or out of bounds.

    >>> read_config("missing.toml")
    Traceback (most recent call last):
    penstock.settings.declare.ConfigError: ...
    """
    values = read_values(path)
    try:
        return from_values(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_values(path: str | Path) -> Values:
    """Read the settings that a run's TOML file gives, by name.

    Raises:
        ConfigError: as `read_config`, except for bounds and combinations.
    """
    try:
        return _values(parse_toml(read_text(path)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a run's TOML file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML of settings: {error}") from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Make a `RunConfig` of plain values, section by section, with defaults for the others.

    Raises:
        ConfigError: an unknown key, a value of a wrong type or out of bounds, or values that cannot go together.
    """
    return from_values(_values(table))


def from_values(values: Mapping[str, Any]) -> RunConfig:
    """Make a `RunConfig` of values by their dotted names. Raises: as `from_dict`."""
    run = with_values(RunConfig(), {SETTINGS[name].path: value for name, value in values.items()})
    num_sequences = run.data.num_sequences // run.parallel.dp
    if "train.num_microbatches" in values or not 0 < num_sequences < run.train.num_microbatches:
        return run
    # None was asked for, so that as many are made as there are sequences.
    return replace(run, train=replace(run.train, num_microbatches=num_sequences))


def section_summaries() -> dict[str, str]:
    """The sections of the file, in order, each with a one-line summary."""
    config, found = RunConfig(), {}
    for own in SETTINGS.values():
        owner: Any = config
        for name in own.path[:-1]:
            owner = getattr(owner, name)
            assert isinstance(owner, Settings)
            if owner.section == own.section:
                found.setdefault(own.section, (type(owner).__doc__ or "").partition("\n")[0])
    return found


def unknown_setting(name: str) -> ConfigError:
    """The error for an unknown dotted name; it names the nearest setting."""
    section, _, key = name.rpartition(".")
    # The right key in a wrong or forgotten section is a likelier slip than a key that merely looks alike.
    same_key = [other for other in SETTINGS if other.rpartition(".")[2] == key]
    same_section = [other for other in SETTINGS if section and other.startswith(f"{section}.")]
    # So is a word of another program, whatever the section.
    close = nearest(name, SETTINGS, 1.0) or nearest(name, same_key or same_section or list(SETTINGS))
    return ConfigError(f"there is no setting {name}; the nearest one is {close}")


def _values(table: Mapping[str, Any]) -> Values:
    """The values of a table by their dotted names, each of its setting's type."""
    sections, values = section_summaries(), {}
    for name, value in table.items():
        if name in sections and isinstance(value, Mapping):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name in sections:
            raise ConfigError(f"{name} is a section; write its settings below [{name}]")
        elif name not in SETTINGS and isinstance(value, Mapping):
            raise ConfigError(f"there is no section [{name}]; the nearest one is [{nearest(name, sections)}]")
        else:
            values[name] = value
    if unknown := next((name for name in values if name not in SETTINGS), None):
        raise unknown_setting(unknown)
    return {name: SETTINGS[name].matched(value) for name, value in values.items()}
