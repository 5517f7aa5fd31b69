"""The arguments of an engine: a model's units, and the options with which they run: plain, frozen, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.families import HuggingFaceForm
from penstock.schedule.choice import OwnSchedule, ScheduleChoice
from penstock.settings import (
    SETTINGS,
    AdapterConfig,
    CompileMode,
    ConfigError,
    ContextForm,
    DataConfig,
    Device,
    InferenceConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    Quantize,
    RunConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
    TransportKind,
    same_as,
)
from penstock.settings.declare import AT_LEAST_1, argument, check_argument, nearest, value_of, walk_settings


@dataclass(frozen=True)
class EngineOptions(Settings):
    """The options of an engine: the settings of a run that belong neither to the model nor to the layout.

    Options that are not listed below are settings of a run, which the page of settings explains.

    Args:
        schedule: the schedule to run, with its cut: a `ScheduleConfig`, a name, a `Schedule`, or a function of the
            numbers of ranks and microbatches that gives one. It is proved before it runs.
        optimizer: the optimizer with its learning rate and groups: an `OptimizerConfig`, a name, or a function that
            makes a torch.optim.Optimizer from parameter groups.
        measure_lengths: lengths of a typical microbatch's sequences. The first rank times the units on them, which
            decides the cut, and the order if the schedule is `auto`. None uses the units' estimated work.
        learns: False for an engine that only scores and generates. It keeps weights alone: no gradients, no fp32
            masters and no optimizer state.
        read_only: True for weights that nothing will change, load or save any more: on a CPU they are packed for
            matrix multiplication as they are read, in place of the parameters. This and quantize need learns=False.
        adapter: LoRA adapters, which alone are then trained: a LoraConfig of peft, a folder in its format, or the
            adapter settings of a run.

    >>> options = EngineOptions("zb-h1", precision="bf16", optimizer=OptimizerConfig(LearningRate(3e-4)))
    >>> options.choice.name, options.optimizer.learning_rate(1)
    ('zb-h1', 0.0003)
    """

    schedule: OwnSchedule = ScheduleConfig()
    measure_lengths: tuple[int, ...] | None = argument(None, AT_LEAST_1)
    label_share: float = same_as(DataConfig, "label_share")
    seed: int = same_as(TrainConfig, "seed")
    precision: Precision = same_as(TrainConfig, "precision")
    recompute: str | tuple[int, ...] = same_as(TrainConfig, "recompute")
    num_kept_microbatches: int = same_as(TrainConfig, "num_kept_microbatches")
    compile: bool | CompileMode = same_as(TrainConfig, "compile")
    reproducible: bool = same_as(TrainConfig, "reproducible")
    deterministic: bool = same_as(TrainConfig, "deterministic")
    optimizer: OptimizerConfig = OptimizerConfig()
    attention: ContextForm = same_as(ParallelConfig, "attention")
    device: Device = same_as(ParallelConfig, "device")
    transport: TransportKind = same_as(ParallelConfig, "transport")
    timeout_s: float = same_as(ParallelConfig, "timeout_s")
    learns: bool = True
    read_only: bool = False
    quantize: Quantize = same_as(InferenceConfig, "quantize")
    adapter: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.adapter, AdapterConfig) and not self.adapter.is_used:
            object.__setattr__(self, "adapter", None)
        object.__setattr__(self, "optimizer", OptimizerConfig.of(self.optimizer))
        object.__setattr__(self, "precision", self.precision or Precision.FP32)
        super().__post_init__()

    def _check(self) -> None:
        if self.packs_for_good:
            setting = f"quantize = {self.quantize}" if self.quantize is not Quantize.NONE else "read_only"
            if self.learns:
                raise ConfigError(f"{setting} leaves no weights to train; give learns=False as well")
            if self.adapter is not None or self.precision is Precision.BF16_AUTOCAST:
                what = "an adapter" if self.adapter is not None else "precision bf16-autocast"
                raise ConfigError(
                    f"{setting} packs weights as they are, and {what} needs them itself; leave out one of them"
                )
        if self.num_kept_microbatches and self.recompute in ("none", ()):
            raise ConfigError(
                f"num_kept_microbatches = {self.num_kept_microbatches} spares microbatches from recomputation, but "
                'recompute names nothing to recompute; "full" and a list of layers do'
            )
        # Each of these gives a token other bits in training than in generation.
        changes_bits = {
            f"precision is {self.precision}; possible is fp32": self.precision is not Precision.FP32,
            "compiled layers do not have the bits of generation; leave one out": self.compile,
            f"quantize = {self.quantize} changes bits; leave one out": self.quantize is not Quantize.NONE,
            "LoRA adapters are other layers than Penstock's own; leave one out": self.adapter is not None,
        }
        if self.reproducible and (wrong := [why for why, is_given in changes_bits.items() if is_given]):
            raise ConfigError(f"reproducible = true: {wrong[0]}")

    @property
    def packs_for_good(self) -> bool:
        """True if packed weights replace the parameters."""
        return self.read_only or self.quantize is not Quantize.NONE

    def check_unpacked(self, act: str) -> None:
        """Refuse an act that needs the parameters themselves. Raises: ValueError if they are packed."""
        if self.packs_for_good:
            raise ValueError(
                f"{act} needs this engine's weights, which it has packed for good; make one without "
                "read_only and quantize"
            )

    @classmethod
    def of(cls, config: RunConfig) -> EngineOptions:
        """The options of an engine for a run."""
        # An option that is declared as a setting of the run has that setting's value; none is copied by hand.
        options = [setting for setting in walk_settings(cls()) if len(setting.path) == 1 and setting.name in SETTINGS]
        values = {setting.path[0]: value_of(config, SETTINGS[setting.name].path) for setting in options}
        sections = {"schedule": config.schedule, "optimizer": config.optimizer.over(config.train.steps)}
        # The sequences of a full microbatch.
        num_sequences = -(-config.data.num_sequences // config.parallel.dp // config.train.num_microbatches)
        lengths = (config.data.sequence_length,) * num_sequences if config.schedule.measure else None
        return cls(**values, **sections, adapter=config.adapter, measure_lengths=lengths)

    @property
    def choice(self) -> ScheduleChoice:
        """The schedule, in whichever form it was given."""
        choice = ScheduleChoice.of(self.schedule)
        return replace(choice, num_kept=self.num_kept_microbatches, recomputes=self.recompute != "none")


# Arguments of a step, which other libraries take when they make an engine.
_STEP_ARGUMENTS = {"criterion", "loss", "loss_fn", "loss_weight_fn"}


def changed(options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineOptions:
    """The options with changes by name. Raises: ConfigError for an unknown name, with the nearest known one."""
    options = options or EngineOptions()
    names = [field.name for field in fields(options)]
    if _STEP_ARGUMENTS & changes.keys():
        option = min(_STEP_ARGUMENTS & changes.keys())
        raise ConfigError(
            f"an engine has no option {option!r}: a loss, and its weights, are given with each batch, as in "
            "train_batch(batch, loss_fn, loss_weight_fn)"
        )
    if unknown := sorted(changes.keys() - names):
        raise ConfigError(f"an engine has no option {unknown[0]!r}; the nearest one is {nearest(unknown[0], names)!r}")
    return replace(options, **changes) if changes else options


UnitSource = Sequence[UnitSpec] | Callable[[ModelGroups], Sequence[UnitSpec]]
"""A model's units, or a function that makes them for the groups that share them."""


def units_for(source: UnitSource, groups: ModelGroups, layout: Layout) -> tuple[UnitSpec, ...]:
    """The units, made for these groups. Raises: ValueError for ready-made units where the layout shares layers."""
    if callable(source):
        units = source(groups)
        check_argument("units", units, Sequence[UnitSpec])
        return tuple(units)
    if (layout.tp, layout.cp, layout.ep) != (1, 1, 1):
        raise ValueError(
            f"the layout {layout} shares a model over tp, cp or ep, but its units are given ready-made; "
            "give a function that makes them from ModelGroups, or a layout of pp and dp alone"
        )
    return tuple(source)


class EngineArguments(NamedTuple):
    """The arguments of `Engine` for a model that settings or a folder describe."""

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    layout: Layout
    options: EngineOptions
    form: HuggingFaceForm | None

    @classmethod
    def of_decoder(cls, shape: ModelConfig, layout: Layout, options: EngineOptions) -> EngineArguments:
        form = HuggingFaceForm.of(shape)
        return cls(lambda groups: decoder_units(shape, groups=groups), shape.hidden_size, layout, options, form)
