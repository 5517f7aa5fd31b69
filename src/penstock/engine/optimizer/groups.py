"""The hyperparameters of every parameter group at any step: functions of the step's number alone."""

from __future__ import annotations

import enum
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.engine.optimizer.steppers import STEPPERS, FlatStepper, Values
from penstock.parallel.gradients import matrices_apart
from penstock.settings import ConfigError, LearningRate, OptimizerConfig, OptimizerName, ParameterGroup, WeightDecay
from penstock.settings.declare import type_in_words
from penstock.settings.training import Course

# ---- The parameter groups of a model: the optimizer and the hyperparameters of each parameter, and how these divide


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer from torch's parameter groups."""

_PROBE_RATE = 0.01
# In float64, where any other way to divide an update differs by far more.
_PROBE_TOLERANCE = 1e-6


class Division(enum.Enum):
    """The finest parts of which an optimizer steps each by itself, as it would step them together."""

    ELEMENTS = enum.auto()
    PARAMETERS = enum.auto()


@dataclass(frozen=True, eq=False)
class OptimizerKind:
    """An optimizer that steps one or several groups."""

    #: for messages
    label: str
    #: makes it as one of torch; of a rule of the package's own, one that only has its hyperparameters
    make: Make
    #: the rule of the package's own, which steps flat buckets
    stepper: type[FlatStepper] | None = None


@dataclass(frozen=True, eq=False)
class GroupRule:
    """One group's optimizer and hyperparameters."""

    kind: OptimizerKind
    #: course of the learning rate; None for that with which the optimizer is made
    rate: Course | None
    #: course of the weight decay; None for that with which the optimizer is made
    decay: Course | None
    #: further keys of torch's parameter group
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def division(self) -> Division:
        """The parts that the optimizer steps independently, found by stepping small tensors.

        Raises:
            ConfigError: it cannot step parameters independently, or without a closure; named with the reason.
        """
        if self.kind.stepper is not None:
            return Division.ELEMENTS
        generator = torch.Generator().manual_seed(0)
        shapes = [(6, 8), (4, 4)]
        values, *gradients = [
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(4)
        ]
        try:
            together = self._stepped(values, gradients)
            apart = [self._stepped([v], [[g[i]] for g in gradients])[0] for i, v in enumerate(values)]
        except ConfigError:
            raise
        except Exception as error:  # whatever the optimizer says
            raise ConfigError(
                f"the optimizer {self.kind.label} cannot step a model in parts: with two small matrices it raises "
                f"{type(error).__name__}: {error}"
            ) from error
        if not all(map(_agree, together, apart, values)):
            raise ConfigError(
                f"the optimizer {self.kind.label} steps all parameters jointly, so no rank can step its own alone"
            )
        flat, cuts = values[0].flatten(), [20]
        try:
            pieces = self._stepped(flat.tensor_split(cuts), [g[0].flatten().tensor_split(cuts) for g in gradients])
        except Exception:  # it takes whole matrices only
            return Division.PARAMETERS
        return Division.ELEMENTS if _agree(torch.cat(list(pieces)), apart[0].flatten(), flat) else Division.PARAMETERS

    def _stepped(self, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The values after one step for each of the gradients."""
        parameters = [nn.Parameter(value.clone()) for value in values]
        optimizer = self.kind.make([{"params": parameters, **self.options}])
        for of_step in gradients:
            for group in optimizer.param_groups:
                group["lr"] = _PROBE_RATE
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]


@dataclass(frozen=True, eq=False)
class ParameterGroups:
    """All groups of an optimizer's settings, and the choice of a parameter's group by its name."""

    config: OptimizerConfig
    #: full name of a copy -> its owner's, whose group it shares
    owners: Mapping[str, str] = field(default_factory=dict)
    #: ends the names of second copies
    suffix: str = "\0"

    @cached_property
    def patterns(self) -> tuple[ParameterGroup, ...]:
        return (*self.config.groups, ParameterGroup("*"))

    @cached_property
    def rules(self) -> tuple[GroupRule, ...]:
        """The groups by number: one for each pattern, the last for all other parameters.

        Without a factory each is two, one of matrices and one of norms and biases.
        """
        config = self.config
        if config.factory is not None:
            label = getattr(config.factory, "__name__", str(config.factory))
            kind = OptimizerKind(label, partial(_made, config.factory, label))
            return tuple(_rule(config, kind, pattern) for pattern in self.patterns)
        names = [OptimizerName(pattern.name or config.name) for pattern in self.patterns]
        arguments = [
            {**(config.arguments.values if name is config.name else {}), **pattern.arguments}
            for name, pattern in zip(names, self.patterns, strict=True)
        ]
        given_any = {name for name, given in zip(names, arguments, strict=True) if given}
        kinds = {name: _kind(name, name in given_any) for name in names}
        return tuple(
            _rule(config, kinds[name], replace(pattern, arguments=given), is_vector)
            for name, pattern, given in zip(names, self.patterns, arguments, strict=True)
            for is_vector in (False, True)
        )

    def number(self, name: str, parameter: nn.Parameter) -> int:
        """The number of the group of a parameter, given by full name."""
        index = self._index(name, parameter)
        return index if self.config.factory is not None else 2 * index + matrices_apart(name, parameter)

    def freezes(self, name: str, parameter: nn.Parameter) -> bool:
        """True if the settings freeze the parameter."""
        return self.patterns[self._index(name, parameter)].frozen

    def division(self, name: str, parameter: nn.Parameter) -> Division:
        """The parts into which the parameter may be divided for its step. Raises: ConfigError as `GroupRule`."""
        return self.rules[self.number(name, parameter)].division

    def _index(self, name: str, parameter: nn.Parameter) -> int:
        owner = self.owners.get(name, name).removesuffix(self.suffix)
        return next(i for i, pattern in enumerate(self.patterns) if pattern.matches(owner, parameter.ndim))


def _made(factory: Callable[[Any], Any], label: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that a user's factory makes. Raises: ConfigError if it makes none."""
    given = _parameters(groups)
    made = factory(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer factory {label} gave {type_in_words(made)}; it gives a torch.optim.Optimizer of the "
            "parameter groups that it is called with"
        )
    if _parameters(made.param_groups) != given:
        raise ConfigError(
            f"the optimizer factory {label} gave an optimizer of other parameters than those of the parameter groups "
            "that it is called with; optimizer.groups freezes parameters by name"
        )
    return made


def _parameters(groups: Iterable[Mapping[str, Any]]) -> set[int]:
    """The identities of the parameters in torch's parameter groups."""
    return {id(parameter) for group in groups for parameter in group["params"]}


def freeze(parameters: Mapping[str, nn.Parameter], groups: ParameterGroups) -> None:
    """Freeze the parameters, given by full name, that the settings freeze."""
    for name, parameter in parameters.items():
        if groups.freezes(name, parameter):
            parameter.requires_grad_(False)


def _kind(name: OptimizerName, has_arguments: bool) -> OptimizerKind:
    """The package's own rule of that name, or the class of torch.optim, which alone takes all of its arguments."""
    cls = next((getattr(torch.optim, other) for other in dir(torch.optim) if other.lower() == name.value), None)
    stepper = STEPPERS.get(name.value)
    if stepper is None or (has_arguments and cls is not None):
        assert cls is not None, f"{name} is neither in torch.optim nor in penstock.engine.optimizer.steppers.STEPPERS"
        return OptimizerKind(cls.__name__, cls)
    defaults = {"lr": 0.0, **stepper.hyperparameters}
    return OptimizerKind(stepper.__name__, partial(torch.optim.Optimizer, defaults=defaults), stepper)


def _rule(config: OptimizerConfig, kind: OptimizerKind, pattern: ParameterGroup, is_vector: bool = False) -> GroupRule:
    """The rule of a pattern's parameters, or only of its matrices, or of its norms and biases."""
    options, rate, decay = dict(pattern.arguments), _rate(config, pattern), _decay(config, pattern, is_vector)
    if rate is None and (base := _base_rate(config, pattern)) is not None:
        options["lr"] = base
    betas = tuple(own if own is not None else usual for own, usual in _betas(config, pattern))
    if config.factory is not None:
        if pattern.beta1 is not None or pattern.beta2 is not None:
            options["betas"] = betas
        return GroupRule(kind, rate, decay, options)
    takes = kind.stepper.hyperparameters if kind.stepper else inspect.signature(kind.make).parameters
    family = {"betas": betas, "eps": config.eps} if "betas" in takes else {}
    options = {name: value for name, value in family.items() if name in takes} | options
    if "betas" not in takes or "eps" not in takes:
        _refuse_unused(config, pattern, kind, ("eps",) if "betas" in takes else ("beta1", "beta2", "eps"))
    if "weight_decay" not in takes:
        if pattern.weight_decay or config.weight_decay not in (WeightDecay(), WeightDecay(0.0)):
            raise ConfigError(f"optimizer.weight_decay is set, but {kind.label} has no weight decay")
        decay = None
    _check_arguments(kind, options)
    return GroupRule(kind, rate, decay, options)


def _betas(config: OptimizerConfig, pattern: ParameterGroup) -> tuple[tuple[float | None, float], ...]:
    return (pattern.beta1, config.beta1), (pattern.beta2, config.beta2)


def _decay(config: OptimizerConfig, pattern: ParameterGroup, is_vector: bool) -> Course | None:
    """The course of a group's weight decay; None where the optimizer decides."""
    own = pattern.weight_decay
    if own is None:
        return _course(0.0 if is_vector else config.weight_decay)
    return _course(own)


def _course(value: Course | float | None) -> Course | None:
    """A number as a course of one value."""
    return value if value is None or callable(value) else lambda step: value


def _base_rate(config: OptimizerConfig, pattern: ParameterGroup) -> float | None:
    """The learning rate from which a scheduler starts; None for the optimizer's own."""
    if isinstance(pattern.learning_rate, int | float):
        return pattern.learning_rate
    return config.learning_rate.peak if isinstance(config.learning_rate, LearningRate) else None


def _rate(config: OptimizerConfig, pattern: ParameterGroup) -> Course | None:
    """The course of a group's learning rate; None where the optimizer or a scheduler decides."""
    own, usual = pattern.learning_rate, config.learning_rate
    if callable(own):
        return own
    if config.scheduler is not None:
        return None
    if own is None:
        return _course(usual)
    if isinstance(usual, LearningRate) and own > 0:
        factor = own / usual.peak
        return replace(usual, peak=own, floor=usual.floor * factor, initial=usual.initial * factor)
    return None if usual is None else _course(own)


def _refuse_unused(config: OptimizerConfig, pattern: ParameterGroup, kind: OptimizerKind, names: Sequence[str]) -> None:
    usual, is_usual = OptimizerConfig(), pattern.name in (None, config.name)
    for name in names:
        value = getattr(pattern, name, None)
        if is_usual and getattr(config, name) != getattr(usual, name):
            value = getattr(config, name)
        if value is not None:
            raise ConfigError(
                f"optimizer.{name} = {value} has no effect on {kind.label}; what it takes goes into optimizer.arguments"
            )


def _check_arguments(kind: OptimizerKind, options: Mapping[str, Any]) -> None:
    if kind.stepper is not None:
        if unknown := sorted(options.keys() - {"lr", *kind.stepper.hyperparameters}):
            possible = ", ".join(kind.stepper.hyperparameters)
            raise ConfigError(f"optimizer.arguments: {kind.label} has no {unknown[0]!r}; possible are {possible}")
        return
    try:
        kind.make([nn.Parameter(torch.zeros(2, 2))], **options)  # type: ignore[call-arg,arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.arguments: {kind.label} refuses {dict(options)}: {error}") from None


def _agree(one: Tensor, other: Tensor, before: Tensor) -> bool:
    """True if two updates of the same values are equal up to rounding."""
    update = (one - before).norm()
    return bool((one - other).norm() <= _PROBE_TOLERANCE * update)


# ---- The hyperparameters of every parameter group at any step: functions of the step's number alone


_NO_VALUES = ("params", "param_names", "initial_lr")


class Rates:
    """Gives each group's hyperparameters at a step, the same on every rank.

    A scheduler of torch acts on a probe, an optimizer over one small parameter of each group, and is stepped until it
    has reached the step that is asked for; for an earlier one it starts again. So a rate depends on the step's number
    alone, whatever was skipped or resumed.
    """

    #: the groups by number
    _rules: Sequence[GroupRule]
    #: for each optimizer of torch's kind, and with a scheduler for the others too
    _probes: Sequence[_Probe]

    def __init__(self, groups: ParameterGroups) -> None:
        self._rules = groups.rules
        scheduler = groups.config.scheduler
        kinds = list(dict.fromkeys(rule.kind for rule in groups.rules))
        self._probes = [
            _Probe(kind, groups.rules, scheduler) for kind in kinds if kind.stepper is None or scheduler is not None
        ]

    def at(self, step: int) -> list[Values]:
        """The groups' hyperparameters at step `step` >= 1, by number."""
        found: dict[int, Values] = {}
        for probe in self._probes:
            found |= probe.at(step)
        for number, rule in enumerate(self._rules):
            if number not in found:
                assert rule.rate is not None and rule.kind.stepper is not None, "others have rates of their own"
                decay = {} if rule.decay is None else {"weight_decay": rule.decay(step)}
                found[number] = {**rule.kind.stepper.hyperparameters, **rule.options, "lr": rule.rate(step), **decay}
        return [found[number] for number in range(len(self._rules))]


class _Probe:
    """An optimizer of one small parameter for each of its groups, whose hyperparameters a scheduler may change."""

    #: makes the optimizer
    _kind: OptimizerKind
    #: makes the scheduler of an optimizer; None without one
    _make_scheduler: Any
    #: the optimizer's groups by number
    _rules: dict[int, GroupRule]

    def __init__(self, kind: OptimizerKind, rules: Sequence[GroupRule], scheduler: Any) -> None:
        self._kind, self._make_scheduler = kind, scheduler
        self._rules = {number: rule for number, rule in enumerate(rules) if rule.kind is kind}
        self._restart()

    def _restart(self) -> None:
        groups = [{"params": [nn.Parameter(torch.zeros(2, 2))], **rule.options} for rule in self._rules.values()]
        self._optimizer = self._kind.make(groups)
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            given = type_in_words(self._optimizer)
            raise ConfigError(f"the optimizer's factory gave {given}; it must give a torch.optim.Optimizer")
        if len(self._optimizer.param_groups) != len(groups):
            raise ConfigError(
                f"the optimizer's factory made {len(self._optimizer.param_groups)} parameter groups of the "
                f"{len(groups)} that it was given; it must keep them"
            )
        self._scheduler = None if self._make_scheduler is None else self._make_scheduler(self._optimizer)
        if self._make_scheduler is not None and (
            not isinstance(self._scheduler, LRScheduler) or isinstance(self._scheduler, ReduceLROnPlateau)
        ):
            raise ConfigError(
                f"a scheduler must be one of torch.optim.lr_scheduler whose rates follow from the step alone, not "
                f"{type_in_words(self._scheduler)}"
            )
        self._step = 1

    def at(self, step: int) -> dict[int, Values]:
        """The hyperparameters at a step, by the number of the group."""
        if self._scheduler is not None:
            if step < self._step:
                self._restart()
            with warnings.catch_warnings():
                # It expects its optimizer to step, which the real ones do.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                while self._step < step:
                    self._scheduler.step()
                    self._step += 1
        found = {}
        for (number, rule), group in zip(self._rules.items(), self._optimizer.param_groups, strict=True):
            if rule.rate is not None:
                group["lr"] = rule.rate(step)
            if rule.decay is not None:
                group["weight_decay"] = rule.decay(step)
            found[number] = {key: value for key, value in group.items() if key not in _NO_VALUES}
        return found
