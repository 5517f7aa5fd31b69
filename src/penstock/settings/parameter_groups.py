"""Groups of parameters by name patterns, each with its own hyperparameters; the optimizers that files can name."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self, cast

from penstock.settings.declare import ConfigError, NamedValue, TableValue, nearest

Course = Callable[[int], float]
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


_COURSE, _BETA, _SWITCH = "a number of 0 or more", "a number of at least 0 and less than 1", "true or false"


def _takes(what: str, fits: Callable[[Any], bool], **default: Any) -> Any:
    """Declare a field of a group, with the values it takes, in words and as a check."""
    return field(**default, metadata={"takes": what, "fits": fits})


def _is_number(value: Any, below: float = math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below


@dataclass(frozen=True)
class ParameterGroup(TableValue):
    """Hyperparameters of the parameters whose full names match a pattern; what is left out is the optimizer's.

    A parameter belongs to the first group that matches it. In a pattern `*` stands for any text, dots included.

    >>> group = ParameterGroup("*.norm.*", weight_decay=0.0)
    >>> group.matches("layers.0.attention.norm.weight", num_dims=1), group.matches("head.weight", num_dims=2)
    (True, False)
    """

    #: matches full names, as `Engine.parameters` lists them
    pattern: str = _takes('a text such as "*.norm.*"', lambda value: isinstance(value, str))
    #: the peak of the optimizer's own course of the learning rate, or a course of the group's own; 0 keeps its weights
    learning_rate: float | Course | None = _takes(
        _COURSE, lambda value: callable(value) or _is_number(value), default=None
    )
    weight_decay: float | Course | None = _takes(
        _COURSE, lambda value: callable(value) or _is_number(value), default=None
    )
    beta1: float | None = _takes(_BETA, lambda value: _is_number(value, below=1.0), default=None)
    beta2: float | None = _takes(_BETA, lambda value: _is_number(value, below=1.0), default=None)
    #: True if only parameters of two dimensions or more belong to it
    matrices: bool = _takes(_SWITCH, lambda value: isinstance(value, bool), default=False)
    #: True if its parameters are not trained
    frozen: bool = _takes(_SWITCH, lambda value: isinstance(value, bool), default=False)
    #: another optimizer for the group
    name: OptimizerName | str | None = _takes(
        "the name of an optimizer", lambda value: isinstance(value, str), default=None
    )
    #: further arguments of the optimizer
    arguments: Mapping[str, Any] = _takes(
        "a table of the optimizer's arguments", lambda value: isinstance(value, Mapping), default_factory=dict
    )

    def __post_init__(self) -> None:
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            if not (value is None and own.default is None) and not own.metadata["fits"](value):
                given = json.dumps(value, default=str)
                raise ConfigError(
                    f"optimizer.groups: {own.name} = {given} is not possible; it takes {own.metadata['takes']}"
                )
        if self.name is not None:
            try:
                object.__setattr__(self, "name", OptimizerName(self.name))
            except ValueError:
                known, likely = ", ".join(OptimizerName), nearest(str(self.name), OptimizerName)
                raise ConfigError(
                    f"optimizer.groups: name = {self.name!r} is none of {known}; the nearest one is {likely}"
                ) from None

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        known = [own.name for own in dataclasses.fields(cls)]
        if unknown := sorted(table.keys() - set(known)):
            raise ConfigError(f"optimizer.groups has no {unknown[0]!r}; possible are {', '.join(known)}")
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
