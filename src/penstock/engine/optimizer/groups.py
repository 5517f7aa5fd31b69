"""The parameter groups of a model: the optimizer and the hyperparameters of each parameter, and how these divide."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from penstock.engine.optimizer.steppers import STEPPERS, GroupRule, OptimizerKind
from penstock.parallel.gradients import matrices_apart
from penstock.settings import ConfigError, LearningRate, OptimizerConfig, OptimizerName, ParameterGroup, WeightDecay
from penstock.settings.declare import type_in_words
from penstock.settings.optimizer import Division, Rate


@dataclass(frozen=True, eq=False)
class ParameterGroups:
    """All groups of an optimizer's settings, and the choice of a parameter's group by its name."""

    config: OptimizerConfig
    #: full name of a copy, second ones included -> its original's, whose group it shares
    originals: Mapping[str, str] = field(default_factory=dict)

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
            named: Any = config.factory
            while isinstance(named, partial):
                named = named.func
            label = getattr(named, "__name__", str(named))
            kind = OptimizerKind(label, partial(_made, config.factory, label), divides=config.divides)
            return tuple(_rule(config, kind, pattern) for pattern in self.patterns)
        names = [OptimizerName(pattern.name or config.name) for pattern in self.patterns]
        arguments = [
            {**(config.arguments.values if name is config.name else {}), **pattern.arguments}
            for name, pattern in zip(names, self.patterns, strict=True)
        ]
        given_any = {name for name, options in zip(names, arguments, strict=True) if options}
        kinds = {name: _kind(name, name in given_any) for name in names}
        return tuple(
            _rule(config, kinds[name], replace(pattern, arguments=options), is_vector)
            for name, pattern, options in zip(names, self.patterns, arguments, strict=True)
            for is_vector in (False, True)
        )

    def number(self, name: str, parameter: nn.Parameter) -> int:
        """The number of the group of a parameter, given by full name."""
        index = self._index(name, parameter)
        return index if self.config.factory is not None else 2 * index + matrices_apart(name, parameter)

    @property
    def usual(self) -> int:
        """The number of the group of matrices that no pattern matches."""
        return len(self.rules) - (1 if self.config.factory is not None else 2)

    def freezes(self, name: str, parameter: nn.Parameter) -> bool:
        """True if the settings freeze the parameter."""
        return self.patterns[self._index(name, parameter)].frozen

    def division(self, name: str, parameter: nn.Parameter) -> Division:
        """The parts into which the parameter may be divided for its step. Raises: ConfigError as `GroupRule`."""
        return self.rules[self.number(name, parameter)].division

    def _index(self, name: str, parameter: nn.Parameter) -> int:
        original = self.originals.get(name, name)
        return next(i for i, pattern in enumerate(self.patterns) if pattern.matches(original, parameter.ndim))


def _made(factory: Callable[[Any], Any], label: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that a user's factory makes. Raises: ConfigError if it makes none."""
    parameters = _parameters(groups)
    made = factory(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer factory {label} gave {type_in_words(made)}; it gives a torch.optim.Optimizer of the "
            "parameter groups that it is called with"
        )
    if _parameters(made.param_groups) != parameters:
        raise ConfigError(
            f"the optimizer factory {label} gave an optimizer of other parameters than those of the parameter groups "
            "that it is called with; optimizer.groups freezes parameters by name"
        )
    if len(made.param_groups) != len(groups):
        raise ConfigError(
            f"the optimizer {type(made).__name__} made {len(made.param_groups)} parameter groups of the {len(groups)} "
            "that it was given; it must keep them, and optimizer.groups makes groups by name and shape"
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
    options, rate, decay = dict(pattern.arguments), _rate(config, pattern), pattern.weight_decay
    if decay is None:
        decay = 0.0 if is_vector else config.weight_decay
    if isinstance(decay, int | float):
        decay = WeightDecay(decay)
    if rate is None:
        # The learning rate from which a scheduler starts; without one, the optimizer's own.
        if isinstance(pattern.learning_rate, int | float):
            options["lr"] = pattern.learning_rate
        elif isinstance(config.learning_rate, LearningRate):
            options["lr"] = config.learning_rate.peak
    betas = tuple(
        of_group if of_group is not None else usual
        for of_group, usual in ((pattern.beta1, config.beta1), (pattern.beta2, config.beta2))
    )
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


def _rate(config: OptimizerConfig, pattern: ParameterGroup) -> Rate | None:
    """The course of a group's learning rate; None where the optimizer or a scheduler decides."""
    of_group, usual = pattern.learning_rate, config.learning_rate
    if callable(of_group):
        return of_group
    if config.scheduler is not None:
        return None
    if of_group is None or usual is None:
        return usual if callable(usual) else None
    if isinstance(usual, LearningRate) and of_group > 0:
        factor = of_group / usual.peak
        return replace(usual, peak=of_group, floor=usual.floor * factor, initial=usual.initial * factor)
    return lambda step: of_group


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
