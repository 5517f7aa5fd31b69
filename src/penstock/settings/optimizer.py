"""The settings of the optimizer: its name, learning rate and weight decay, and groups of parameters by name patterns.

Learning rate and weight decay are closed forms of the step number, counted from 1. There is no state from step to step,
so a skipped step does not shift later ones.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Self, cast

from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FRACTION,
    ConfigError,
    NamedValue,
    Setting,
    Settings,
    TableValue,
    argument,
    setting,
)

Rate = Callable[[int], float]
"""The value of a hyperparameter at each step, counted from 1."""


class OptimizerName(NamedValue):
    """An optimizer of `torch.optim`. AdamW runs as a fused kernel over flat buckets unless it has other arguments."""

    ADAMW = "adamw"
    ADADELTA = "adadelta"
    ADAFACTOR = "adafactor"
    ADAGRAD = "adagrad"
    ADAM = "adam"
    ADAMAX = "adamax"
    ASGD = "asgd"
    MUON = "muon"
    NADAM = "nadam"
    RADAM = "radam"
    RMSPROP = "rmsprop"
    RPROP = "rprop"
    SGD = "sgd"


class Division(NamedValue):
    """The finest parts of a model that an optimizer steps each by itself, as it would step them together."""

    ELEMENTS = "elements"
    PARAMETERS = "parameters"
    MODEL = "model"


@dataclass(frozen=True)
class Arguments(TableValue):
    """Further arguments of an optimizer's class, by name.

    >>> Arguments.read({"momentum": 0.9}).values
    {'momentum': 0.9}
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        return cls(dict(table))

    def table(self) -> dict[str, Any]:
        return dict(self.values)


@dataclass(frozen=True)
class ParameterGroup(Settings, TableValue, section="optimizer.groups"):
    """Hyperparameters of the parameters whose full names match a pattern; what is left out is the optimizer's.

    A parameter belongs to the first group that matches it. In a pattern `*` stands for any text, dots included.

    >>> group = ParameterGroup("*.norm.*", weight_decay=0.0)
    >>> group.matches("layers.0.attention.norm.weight", num_dims=1), group.matches("head.weight", num_dims=2)
    (True, False)
    """

    #: matches full names, as `Engine.parameters` lists them
    pattern: str
    #: the peak of the optimizer's own course of the learning rate, or a course of the group's own; 0 keeps its weights
    learning_rate: float | Rate | None = argument(None, AT_LEAST_0)
    weight_decay: float | Rate | None = argument(None, AT_LEAST_0)
    beta1: float | None = argument(None, FRACTION)
    beta2: float | None = argument(None, FRACTION)
    #: True if only parameters of two dimensions or more belong to it
    matrices: bool = False
    #: True if its parameters are not trained
    frozen: bool = False
    #: another optimizer for the group
    name: OptimizerName | str | None = None
    #: further arguments of the optimizer
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        own = Setting(section=self.section, key="name", type=OptimizerName | None)
        object.__setattr__(self, "name", own.matched(self.name))

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        if "pattern" not in table:
            raise ConfigError('a table of optimizer.groups needs a pattern, such as "*.norm.*"')
        return cls(**cast(dict[str, Any], dict(table)))

    def table(self) -> dict[str, Any]:
        given = {own.name: getattr(self, own.name) for own in dataclasses.fields(self)}
        usual = ParameterGroup(self.pattern)
        changed = {key: value for key, value in given.items() if key == "pattern" or value != getattr(usual, key)}
        return {key: str(value) if callable(value) or key == "name" else value for key, value in changed.items()}

    def matches(self, name: str, num_dims: int) -> bool:
        """True for a parameter of the group, given by full name."""
        return fnmatchcase(name, self.pattern) and (num_dims >= 2 or not self.matrices)


class Decay(NamedValue):
    """The decay of the learning rate after its warm-up.

    >>> LearningRate(peak=0.4, decay="cosine", num_decay_steps=2).decay is Decay.COSINE
    True
    """

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQRT = "inverse-sqrt"


class Ramp(NamedValue):
    """The course of weight decay from its first value to its last."""

    LINEAR = "linear"
    COSINE = "cosine"


_SHARE = re.compile(r"\d{1,2}(\.\d+)?%")


@dataclass(frozen=True)
class LearningRate(Settings, section="optimizer"):
    """A linear rise from `initial` to `peak` over the warm-up, then a fall that ends at `floor`.

    With w warm-up steps and the fall ending at step n, step t in (w, n] has progress x = (t - w) / (n - w) and

        constant      peak
        linear        floor + (peak - floor) (1 - x)
        cosine        floor + (peak - floor) (1 + cos(pi x)) / 2
        inverse-sqrt  max(floor, peak sqrt(max(w, 1) / t)), for any t > w; it has no end

    After step n the linear and the cosine form stay at `floor`.

    Source: linear warm-up and inverse square root: arXiv 1706.03762, section 5.3. Cosine: arXiv 1608.03983, section 3
    (one cycle).

    >>> rate = LearningRate(peak=0.4, decay=Decay.LINEAR, num_warmup_steps=2, num_decay_steps=4)
    >>> [rate(step) for step in (1, 2, 3, 4, 5)]
    [0.2, 0.4, 0.2, 0.0, 0.0]
    """

    peak: float = setting(1e-3, "The highest learning rate.", ABOVE_0, key="learning_rate")
    decay: Decay = setting(Decay.CONSTANT, "Decay of the learning rate after the warm-up.")
    num_warmup_steps: int | str = setting(
        0, 'Steps over which the learning rate rises from zero, or their share of the run, such as "7%".', AT_LEAST_0
    )
    num_decay_steps: int | None = setting(
        None, "The step at which the decay ends; left out, the last step of the run.", AT_LEAST_1
    )
    #: The rate before the first step; not a setting of a run.
    initial: float = argument(0.0, AT_LEAST_0)
    floor: float = setting(0.0, "The learning rate at the end of the decay.", AT_LEAST_0, key="final_learning_rate")

    def _check(self) -> None:
        for name, value in (("final_learning_rate", self.floor), ("initial", self.initial)):
            if value > self.peak:
                raise ConfigError(
                    f"optimizer.{name} = {value} is above optimizer.learning_rate = {self.peak}; the rate can only "
                    "rise to that and fall from it"
                )
        end, warmup = self.num_decay_steps, self.num_warmup_steps
        if isinstance(warmup, str) and not _SHARE.fullmatch(warmup):
            raise ConfigError(
                f"optimizer.num_warmup_steps = {warmup!r} is no share of the run; give a number of steps, or a share "
                'below 100% such as "7%"'
            )
        if self.ends and end is not None and isinstance(warmup, int) and end < warmup:
            raise ConfigError(
                f"optimizer.num_decay_steps = {end} lies within its warm-up of {self.num_warmup_steps} steps; "
                f"{self.num_warmup_steps} or more are possible"
            )

    def warmup(self, num_steps: int) -> int:
        """The warm-up's steps of a run of `num_steps`; a share is rounded up, and never all of them."""
        own = self.num_warmup_steps
        return own if isinstance(own, int) else min(math.ceil(num_steps * Fraction(own[:-1]) / 100), num_steps - 1)

    @property
    def ends(self) -> bool:
        """True if the decay has an end."""
        return self.decay in (Decay.LINEAR, Decay.COSINE)

    def __call__(self, step: int) -> float:
        """Return the rate of step `step` >= 1; that of step 0 is the value before the first.

        Raises:
            ConfigError: the decay has an end that is left out.
        """
        warmup, end = self.num_warmup_steps, self.num_decay_steps
        if isinstance(warmup, str):
            raise ConfigError(f"optimizer.num_warmup_steps = {warmup!r} needs the length of a run; give steps")
        if self.ends and end is None:
            raise ConfigError(f"optimizer.decay = {self.decay} needs num_decay_steps, the step at which it ends")
        if step < warmup:
            return self.initial + (self.peak - self.initial) * step / warmup
        if self.decay is Decay.INVERSE_SQRT:
            first = max(warmup, 1)
            return max(self.floor, self.peak * math.sqrt(first / max(step, first)))
        if end is None or not self.ends:
            return self.peak
        progress = 1.0 if step >= end else (step - warmup) / (end - warmup)
        if self.decay is Decay.LINEAR:
            return self.floor + (self.peak - self.floor) * (1 - progress)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class WeightDecay(Settings, section="optimizer"):
    """Weight decay that goes from `first` to `last` by step `num_steps`, and stays there.

    With progress x = t / num_steps at step t: linear first + (last - first) x; cosine
    first + (last - first) (1 - cos(pi x)) / 2. Without a last value it is constant.

    >>> WeightDecay(0.0, 0.4, Ramp.LINEAR, num_steps=4)(1)
    0.1
    """

    first: float = setting(0.1, "Weight decay; norms and biases have none.", AT_LEAST_0, key="weight_decay")
    last: float | None = setting(
        None,
        "Final weight decay, reached by cosine over the run; left out, it is constant.",
        AT_LEAST_0,
        key="final_weight_decay",
    )
    ramp: Ramp = Ramp.COSINE
    #: The step at which the last value is reached.
    num_steps: int | None = argument(None, AT_LEAST_1)

    def __call__(self, step: int) -> float:
        """Return the weight decay of step `step` >= 1.

        Raises:
            ConfigError: it changes, and the step of reaching its last value is left out.
        """
        if self.last is None:
            return self.first
        if self.num_steps is None:
            raise ConfigError(f"optimizer.final_weight_decay = {self.last} needs num_steps, the step of reaching it")
        progress = min(1.0, step / self.num_steps)
        if self.ramp is Ramp.COSINE:
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.first + (self.last - self.first) * progress


# What is left out, told from equal values by its identity.
_USUAL_RATE, _USUAL_DECAY, _USUAL_NORM = LearningRate(), WeightDecay(), float("1")


@dataclass(frozen=True)
class OptimizerConfig(Settings, section="optimizer"):
    """The optimizer, its schedules and its groups of parameters.

    Norms and biases are never decayed, unless a group of theirs gives a weight decay. A number for the learning rate
    or the weight decay stands for a constant.

    >>> OptimizerConfig(name="sgd", arguments={"momentum": 0.9}).arguments.values
    {'momentum': 0.9}

    Source: arXiv 1711.05101, algorithm 2. Clipping: arXiv 1211.5063, section 3.2.

    >>> config = OptimizerConfig(LearningRate(3e-4, num_warmup_steps=10), weight_decay=WeightDecay(0.01))
    >>> config.learning_rate(5), config.weight_decay(5), config.clip_norm
    (0.00015, 0.01, 1.0)
    """

    #: with a `factory`: left out, or None, for the rates with which that makes its optimizer
    learning_rate: LearningRate | Rate | float | None = _USUAL_RATE
    beta1: float = setting(0.9, "Decay of the mean of gradients (Adam's family).", FRACTION)
    beta2: float = setting(0.95, "Decay of the mean of squared gradients (Adam's family).", FRACTION)
    eps: float = setting(1e-8, "Added to the root of the mean of squared gradients (Adam's family).", ABOVE_0)
    #: with a `factory`: as `learning_rate`
    weight_decay: WeightDecay | Rate | float | None = _USUAL_DECAY
    #: with a `factory`: left out, there is no clipping
    clip_norm: float = setting(_USUAL_NORM, "Gradients are clipped to this global norm; 0 for no clipping.", AT_LEAST_0)
    zero: bool = setting(
        False,
        "Data- and context-parallel ranks shard the optimizer's state and fp32 masters: each steps its shard, and the "
        "results are gathered (ZeRO-1).",
    )
    name: OptimizerName = setting(OptimizerName.ADAMW, "The optimizer, one of torch.optim.", is_newer=True)
    arguments: Arguments = setting(
        Arguments(), "Further arguments of the optimizer's class, such as momentum.", is_newer=True
    )
    groups: tuple[ParameterGroup, ...] = setting(
        (),
        "Parameters by name pattern with a learning rate, decay, betas or optimizer of their own, or frozen.",
        is_newer=True,
    )
    #: makes an optimizer of any class from torch's parameter groups, in place of `name`; not a setting of a run
    factory: Callable[[Any], Any] | None = None
    #: how the step of the factory's optimizer may be divided among ranks; None for its class's own attribute `divides`,
    #: what is known of a class of torch or torchao, or "parameters"; not a setting of a run
    divides: Division | None = None
    #: makes a scheduler of torch.optim.lr_scheduler from an optimizer; not a setting of a run
    scheduler: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, given: "OptimizerConfig | OptimizerName | str | Callable[[Any], Any]") -> "OptimizerConfig":
        """The settings as they are, of an optimizer's name, or of a factory alone.

        Raises:
            ConfigError: it is none of these.
        """
        if isinstance(given, OptimizerConfig):
            return given
        if isinstance(given, str):
            return replace(cls(), name=given)
        if callable(given):
            return cls(factory=given)
        kind = type(given).__name__
        if hasattr(given, "param_groups"):
            raise ConfigError(
                f"optimizer is an instance of {kind}, but each rank makes one for the parameters "
                f"that it steps; give the class {kind}, or functools.partial of it with its arguments"
            )
        raise ConfigError(
            f"optimizer = {given!r} is not possible; give an OptimizerConfig, a name such as 'sgd', or a function that "
            "makes a torch.optim.Optimizer from parameter groups"
        )

    def _check(self) -> None:
        if self.factory is not None:
            # A factory's optimizer steps as it is made, unless something else is given, even if it equals the usual.
            rates = (("learning_rate", _USUAL_RATE, None), ("weight_decay", _USUAL_DECAY, None))
            for name, usual, as_made in (*rates, ("clip_norm", _USUAL_NORM, 0.0)):
                if getattr(self, name) is usual:
                    object.__setattr__(self, name, as_made)
            if named := [group for group in self.groups if group.name is not None]:
                raise ConfigError(
                    f"optimizer.groups: {named[0].pattern!r} asks for {named[0].name}, but a factory makes the "
                    "optimizer of all groups; leave one of them out"
                )
        elif self.divides is not None:
            raise ConfigError("optimizer.divides describes the optimizer of a factory, and there is none")
        elif self.learning_rate is None or self.weight_decay is None:
            raise ConfigError("only an optimizer that a factory makes has a learning rate and a weight decay by itself")
        rate = self.learning_rate
        stays = isinstance(rate, LearningRate) and rate.decay is Decay.CONSTANT and not rate.num_warmup_steps
        if self.scheduler is not None and not (stays or rate is None):
            raise ConfigError("the learning rate has a scheduler and a course of its own; only one can set it")

    def __post_init__(self) -> None:
        for name, schedule in (("learning_rate", LearningRate), ("weight_decay", WeightDecay)):
            if isinstance(getattr(self, name), int | float):
                object.__setattr__(self, name, schedule(getattr(self, name)))
        super().__post_init__()

    def num_decay_steps(self, num_steps: int) -> int | None:
        """The step of a run of `num_steps` at which its rates reach their ends; None if they are constant."""
        rate, decay = self.learning_rate, self.weight_decay
        ends = isinstance(rate, LearningRate) and rate.ends
        moves = ends or (isinstance(decay, WeightDecay) and decay.last is not None)
        own = rate.num_decay_steps if isinstance(rate, LearningRate) else None
        return (own or num_steps) if moves else None

    def over(self, num_steps: int) -> "OptimizerConfig":
        """The settings for a run of `num_steps`, which ends the rates whose own end is left out."""
        rate, decay, end = self.learning_rate, self.weight_decay, self.num_decay_steps(num_steps)
        if isinstance(rate, LearningRate):
            rate = replace(rate, num_decay_steps=end, num_warmup_steps=rate.warmup(num_steps))
        if isinstance(decay, WeightDecay):
            decay = replace(decay, num_steps=end)
        return replace(self, learning_rate=rate, weight_decay=decay)
