"""All settings of a run, section by section, and which of them decide its numbers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from penstock.settings.data import DataConfig
from penstock.settings.declare import (
    AT_LEAST_0,
    AT_LEAST_1,
    NamedValue,
    Setting,
    Settings,
    plain,
    setting,
    value_of,
    walk,
)
from penstock.settings.model import ModelConfig
from penstock.settings.optimizer import Decay, LearningRate, OptimizerConfig
from penstock.settings.parallel import ParallelConfig
from penstock.settings.schedule import ScheduleConfig

Recompute = Literal["none", "full"] | tuple[int, ...]


class Precision(NamedValue):
    """FP32 and FP64: parameters and compute; BF16 and FP16: 16-bit parameters with fp32 masters (FP16 with a loss
    scaler); BF16_AUTOCAST: fp32 parameters, forwards under autocast."""

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
    """

    GLOBAL = "global"
    DP = "dp"
    TOKEN_PER_MICROBATCH = "token_per_microbatch"
    MICROBATCH_MEAN = "microbatch_mean"

    @classmethod
    def parse(cls, mode: "Normalize | str") -> "Normalize":
        """The mode of that name. Raises ValueError that lists the names."""
        try:
            return cls({"global_token": "global", "dp_token": "dp"}.get(str(mode), mode))
        except ValueError:
            names = ", ".join(repr(m.value) for m in cls)
            raise ValueError(f"normalize must be one of {names}, not {mode!r}") from None


@dataclass(frozen=True)
class TrainConfig(Settings, section="train"):
    """The loop."""

    steps: int = setting(100, "Optimizer steps.", AT_LEAST_1)
    seed: int = setting(0, "Decides the initial weights and the order of the data.", AT_LEAST_0)
    precision: Precision = setting(
        Precision.FP32, "Parameters in fp32, fp64 or 16 bit (with fp32 masters), or fp32 with autocast."
    )
    recompute: Recompute = setting(
        "none", 'Activation checkpointing: layers recomputed in backward: "none", "full", or their numbers.'
    )
    normalize: Normalize = setting(Normalize.GLOBAL, "The divisor of the loss.")
    num_microbatches: int = setting(8, "Parts of a data-parallel rank's batch, at least.", AT_LEAST_1)
    max_microbatch_tokens: int | None = setting(
        None, "A budget of tokens for each part; left out, there is none.", AT_LEAST_1
    )


@dataclass(frozen=True)
class CheckpointConfig(Settings, section="checkpoint"):
    """Checkpointing."""

    every: int = setting(100, "Steps between checkpoints; 0 saves at the end alone.", AT_LEAST_0)
    keep: int = setting(3, "The newest checkpoints that are kept.", AT_LEAST_1)
    in_background: bool = setting(True, "Write while training goes on.")


@dataclass(frozen=True)
class ValidationConfig(Settings, section="validation"):
    """Loss on text that is not trained on."""

    every: int = setting(100, "Steps between validations; 0 validates at the end alone.", AT_LEAST_0)
    num_sequences: int = setting(64, "Sequences of one validation, always the same.", AT_LEAST_1)


@dataclass(frozen=True)
class LogConfig(Settings, section="log"):
    """Logging."""

    every: int = setting(1, "Steps between lines of metrics.", AT_LEAST_1)
    tensorboard: bool = setting(True, "Write for TensorBoard beside metrics.jsonl.")
    timeline: bool = setting(True, "At the end, draw the last step's measured timeline under the simulated one.")


@dataclass(frozen=True)
class RunConfig(Settings):
    """All settings of a run."""

    output: str = setting("runs/penstock", "The run's folder: checkpoints, metrics, a copy of the settings.")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig(LearningRate(decay=Decay.COSINE))
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    log: LogConfig = LogConfig()

    def flat(self) -> dict[str, Any]:
        """Plain values under dotted names: ``{"train.steps": 100, ...}``."""
        return {own.name: plain(value_of(self, own.path)) for own in SETTINGS.values()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, section by section, as JSON can hold them."""
        table: dict[str, Any] = {}
        for own in SETTINGS.values():
            section = table.setdefault(own.section, {}) if own.section else table
            section[own.key] = plain(value_of(self, own.path))
        return table

    def identity(self) -> dict[str, Any]:
        """The settings that decide the numbers of the run, under dotted names; equal ones continue each other.

        How a run is cut, logged, saved or how long it lasts is left out: pipeline ranks and schedules do not change a
        single bit, tensor- and expert-parallel ranks nothing but rounding. Nor, but for rounding, do data- and
        context-parallel ranks and microbatches while the loss of a step is divided by all its tokens.
        """
        settings = self.flat()
        settings["optimizer.num_decay_steps"] = self.optimizer.num_decay_steps(self.train.steps)
        free = _FREE if self.train.normalize is Normalize.GLOBAL else _FREE - _FREE_IF_GLOBAL
        return {name: value for name, value in settings.items() if not free & {name, name.partition(".")[0]}}

    def digest(self) -> str:
        """Sixteen hex digits over `identity`."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fit(self, world_size: int) -> "RunConfig":
        """The settings for a group of `world_size` processes, where `parallel.elastic` allows it; else unchanged.

        The group's size must be a multiple of one pipeline's. A pipeline that takes over the work of others takes as
        many microbatches more, so that each stays as large as it was, and so does the memory.
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


SETTINGS: Mapping[str, Setting] = {own.name: own for own in walk(RunConfig())}
"""Every setting of a run by its dotted name, in the order of the file."""

# Settings, or whole sections, that a continued run may change.
_FREE_IF_GLOBAL = frozenset({"parallel.dp", "parallel.cp", "train.num_microbatches", "train.max_microbatch_tokens"})
_FREE = _FREE_IF_GLOBAL | {
    "output",
    "log",
    "checkpoint",
    "validation",
    "schedule",
    "train.steps",
    "data.cache",
    "parallel.pp",
    "parallel.tp",
    "parallel.ep",
    "parallel.order",
    "parallel.attention",
    "optimizer.zero",
    "parallel.device",
    "parallel.elastic",
    "parallel.num_threads",
    "parallel.timeout_s",
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
