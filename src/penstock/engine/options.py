"""The options with which an engine runs a model: plain, frozen, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

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
from penstock.settings.declare import AT_LEAST_1, argument, nearest, value_of, walk_settings


@dataclass(frozen=True)
class EngineOptions(Settings):
    """The settings of a run that do not belong to the model or the layout.

    Those that are not listed below bear the names of a run's settings, which the page of settings explains.

    Args:
        schedule: the schedule to run, with its cut; a name alone will do, or a user's own: a function of the numbers of
            ranks and microbatches that gives a `Schedule`, or the `Schedule` itself. It is proved before it runs.
        optimizer: the optimizer's settings and schedules; its name, or a function that makes a torch.optim.Optimizer
            from parameter groups, will do.
        measure_lengths: lengths of a typical microbatch's sequences: units are measured on them before the cut, on the
            first rank, and `auto` searches an order for their times; None for the units' estimated work.
        learns: False for an engine that only scores and generates. It keeps weights alone: no gradients, no
            fp32 masters and no state of an optimizer.
        read_only: True for weights that nothing will change, load or save any more: on a CPU they are packed for their
            products as they are read, in the place of the parameters. Only with learns=False, and so is quantize.
        adapter: a LoraConfig of peft, a folder in its format, or the settings of a run: then these LoRA adapters are
            trained, and nothing else.

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
            setting_given = f"quantize = {self.quantize}" if self.quantize is not Quantize.NONE else "read_only"
            if self.learns:
                raise ConfigError(f"{setting_given} leaves no weights to train; give learns=False as well")
            if self.adapter is not None or self.precision is Precision.BF16_AUTOCAST:
                what = "an adapter" if self.adapter is not None else "precision bf16-autocast"
                raise ConfigError(
                    f"{setting_given} packs weights as they are, and {what} needs them itself; leave out one of them"
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
        """True if packed weights take the place of parameters."""
        return self.read_only or self.quantize is not Quantize.NONE

    def check_unpacked(self, act: str) -> None:
        """Refuse an act that needs the parameters themselves. Raises: ValueError where they have been packed."""
        if self.packs_for_good:
            raise ValueError(
                f"{act} needs this engine's weights, which it has packed for good; make one without "
                "read_only and quantize"
            )

    @classmethod
    def of(cls, config: RunConfig) -> "EngineOptions":
        """The options of an engine for a run."""
        # Whatever is declared as a setting of the run is that setting's value; none is copied by hand.
        ours = [setting for setting in walk_settings(cls()) if len(setting.path) == 1 and setting.name in SETTINGS]
        same = {setting.path[0]: value_of(config, SETTINGS[setting.name].path) for setting in ours}
        sections = {"schedule": config.schedule, "optimizer": config.optimizer.over(config.train.steps)}
        # Those of a full microbatch.
        num_sequences = -(-config.data.num_sequences // config.parallel.dp // config.train.num_microbatches)
        lengths = (config.data.sequence_length,) * num_sequences if config.schedule.measure else None
        return cls(**same, **sections, adapter=config.adapter, measure_lengths=lengths)

    @property
    def choice(self) -> ScheduleChoice:
        """The schedule, whichever way it was given."""
        return replace(ScheduleChoice.of(self.schedule), num_kept=self.num_kept_microbatches)

    @property
    def cut(self) -> tuple[int, ...] | str | None:
        """Units of each stage, by hand, as numbers or letters; None for the cut with the fastest slowest rank."""
        return self.choice.settings.cut


# What users give an engine, and other libraries take so.
_OF_A_STEP = {"criterion", "loss", "loss_fn", "loss_weight_fn"}


def changed(options: EngineOptions | None, changes: Mapping[str, Any]) -> EngineOptions:
    """The options with some replaced, by name. Raises: ConfigError for a name that none has; names the nearest one."""
    options = options or EngineOptions()
    known = [field.name for field in fields(options)]
    if _OF_A_STEP & changes.keys():
        option = min(_OF_A_STEP & changes.keys())
        raise ConfigError(
            f"an engine has no option {option!r}: a loss, and its weights, are given with each batch, as in "
            "train_batch(batch, loss_fn, loss_weight_fn)"
        )
    if unknown := sorted(changes.keys() - known):
        raise ConfigError(f"an engine has no option {unknown[0]!r}; the nearest one is {nearest(unknown[0], known)!r}")
    return replace(options, **changes) if changes else options
