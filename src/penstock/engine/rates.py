"""The hyperparameters of every parameter group at any step: functions of the step's number alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.engine.parameter_groups import GroupRule, OptimizerKind, ParameterGroups
from penstock.engine.steppers import Values
from penstock.settings import ConfigError
from penstock.settings.arguments import type_in_words

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
        return [found[i] if i in found else _values(rule, step) for i, rule in enumerate(self._rules)]


def _values(rule: GroupRule, step: int) -> Values:
    assert rule.rate is not None and rule.kind.stepper is not None, "only other optimizers have rates of their own"
    decay = {} if rule.decay is None else {"weight_decay": rule.decay(step)}
    return {**rule.kind.stepper.hyperparameters, **rule.options, "lr": rule.rate(step), **decay}


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
