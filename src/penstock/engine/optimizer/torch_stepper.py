"""Any optimizer of torch's kind, over the parameters that a rank steps, with all the state that it keeps anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.optimizer.form import (
    FORM,
    GROUP,
    OPTIMIZER,
    WIDE,
    NoForm,
    deep_copy,
    described,
    keeps_type,
    put_together,
    taken_apart,
)
from penstock.engine.optimizer.steppers import (
    Block,
    FlatStepper,
    GroupRule,
    OptimizerKind,
    OwnedState,
    StateName,
    Stored,
    Values,
    known_division,
    with_rates_of_its_own,
)
from penstock.parallel import Place
from penstock.parallel.gradients import in_place_of
from penstock.runtime.layer_state import KeptState, has_state
from penstock.settings import ConfigError, Division

_PARAMETER = "a parameter"
# Functions and modules are no state.
_NO_STATE = (type, ModuleType)


class TorchStepper:
    """An optimizer of torch's kind, over the parameters in their shapes, or over flat parts of them.

    It is never stepped but for a step of the engine. What it keeps is learned from it after that: for each parameter,
    in its groups (running values), and in attributes (what has changed since it was made). What a checkpoint holds of
    it is made anew from there and given to it by `continue_from`.
    """

    #: the optimizer's groups by number
    _rules: Mapping[int, GroupRule]
    #: stands for a parameter in the names of its attributes
    _owner: str
    #: True for one of torch or torchao, which leaves gradients and the memory of parameters as they are
    _is_known: bool
    #: what is stepped, by name
    _stepped: Mapping[str, _Stepped]
    #: the names, by identity
    _names: Mapping[int, str]
    _optimizer: torch.optim.Optimizer
    #: the groups, by owner, and the attributes, as they were made
    _as_made: Mapping[str, AsMade]
    #: the keys of the groups that rates set
    _set: set[str]
    #: what `state` or `expect` gave last, which may have been written to
    _listed: dict[StateName, OwnedState] | None

    def __init__(
        self, kind: OptimizerKind, rules: Mapping[int, GroupRule], number: int, blocks: Sequence[Block]
    ) -> None:
        self._rules, self._owner = rules, f"{OPTIMIZER}{number}"
        self._stepped = {place.name: _Stepped.of(block, place) for block in blocks for place in block.places}
        self._names = {id(one.parameter): name for name, one in self._stepped.items()}
        self._optimizer, self._set, self._listed = self._made(kind), set(), None
        self._is_known = known_division(self._optimizer) is not None
        self._as_made = {
            owner: AsMade.of(values, self._names, self._known()) for owner, values in self._beside().items()
        }

    def step(self, values: Sequence[Values]) -> None:
        for number, group in self._groups().items():
            self._set |= values[number].keys()
            for key, value in values[number].items():
                # As torch's schedulers do.
                group[key].fill_(value) if isinstance(group.get(key), Tensor) else group.update({key: value})
        self._listed = None
        for one in self._stepped.values():
            # A user's own may keep its gradients, as it may where a plain loop sets them to None.
            one.parameter.grad = one.gradient if self._is_known else one.gradient.clone()
        self._optimizer.step()
        for one in () if self._is_known else self._stepped.values():
            if one.parameter.data_ptr() != one.values.data_ptr() or one.parameter.stride() != one.values.stride():
                one.values.copy_(one.parameter)
                one.parameter.data = one.values
            one.parameter.grad = None

    # ---- what it keeps

    def state(self) -> dict[StateName, OwnedState]:
        """All that it keeps. Raises: ConfigError naming what a checkpoint cannot hold."""
        self._listed = self._kept()
        return self._listed

    def _kept(self) -> dict[StateName, OwnedState]:
        found = dict[StateName, OwnedState]()
        memory = {one.values.untyped_storage()._cdata: _PARAMETER for one in self._stepped.values()}
        for name, one in self._stepped.items():
            written = [key for key, value in vars(one.parameter).items() if value is not one.attributes.get(key, self)]
            # torch.compile makes such.
            if written := [key for key in sorted(written) if not key.startswith("_dynamo")]:
                raise ConfigError(
                    f"the optimizer {self._label} keeps {written[0]!r} as an attribute of {name}, which no checkpoint "
                    "holds; it holds what is in self.state[parameter]"
                )
            own = self._optimizer.state.get(one.parameter, {})
            for kind, value in self._apart(own, one.parameter, name, memory).items():
                is_like = value.shape == one.parameter.shape and kind != FORM
                found[kind, name] = OwnedState(one.place, value.reshape(-1)) if is_like else OwnedState(None, value)
        for owner, values in self._shared().items():
            for kind, value in self._apart(values, None, owner, memory).items():
                found[kind, owner] = OwnedState(None, value)
        return found

    def expect(self, stored: Mapping[StateName, Stored]) -> dict[StateName, OwnedState]:
        """Make room for what a checkpoint has of its parameters, to be loaded there and then `continue_from`."""
        self._listed = {}
        for (kind, name), (dtype, shape) in stored.items():
            one = self._stepped.get(name)
            if one is None and name not in self._as_made:
                continue
            device = torch.device("cpu") if one is None or kind == FORM else one.parameter.device
            if shape is not None:
                self._listed[kind, name] = OwnedState(None, torch.zeros(shape, dtype=dtype, device=device))
                continue
            own = self._stepped[name].parameter
            # The precision may be another one than that of the run that was saved.
            kept = own.dtype if dtype in WIDE and not keeps_type(kind) else dtype
            values = torch.zeros(own.numel(), dtype=kept, device=device)
            self._listed[kind, name] = OwnedState(self._stepped[name].place, values)
        return self._listed

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        listed, self._listed = self._listed, None
        if listed is None:
            return
        by_owner: dict[str, dict[str, Tensor]] = {}
        for (kind, name), own in listed.items():
            values = own.values if own.place is None else own.values.view(self._stepped[name].parameter.shape)
            by_owner.setdefault(name, {})[kind] = values
        parameters = {name: one.parameter for name, one in self._stepped.items()}
        found = {name: put_together(tensors, parameters) for name, tensors in by_owner.items()}
        states = {parameter: found[name] for name, parameter in parameters.items() if name in found}
        beside = {
            owner: deep_copy(dict(made.values), self._known()) | found.get(owner, {})
            for owner, made in self._as_made.items()
        }
        attributes = self._attributes()
        changed = self._as_made[self._owner].changed(attributes, self._names)
        states |= beside[self._owner].pop("state", {})
        beside[self._owner] = {k: v for k, v in attributes.items() if k not in changed} | beside[self._owner]
        self._take(states, beside)

    def _take(self, states: Mapping[Any, Any], beside: Mapping[str, Mapping[str, Any]]) -> None:
        """Take states and what `_beside` gives for all that it keeps."""
        optimizer = self._optimizer
        _replace(optimizer.state, states)
        for number, group in self._groups().items():
            _replace(group, {"params": group["params"], **beside[f"{GROUP}{number}"]})
        for key in self._attributes().keys() - beside[self._owner].keys():
            delattr(optimizer, key)
        vars(optimizer).update(beside[self._owner])

    def snapshot(self) -> Callable[[], None]:
        optimizer = self._optimizer
        own = [optimizer.state, optimizer.param_groups] if self._is_known else [optimizer]
        return KeptState.of_values([*(one.parameter for one in self._stepped.values()), *own]).hold().restore

    @property
    def state_bytes(self) -> int:
        try:
            return sum(state.values.nbytes for state in self._kept().values())
        except ConfigError:
            own = self._optimizer.state.values()
            return sum(value.nbytes for values in own for value in values.values() if isinstance(value, Tensor))

    @property
    def _label(self) -> str:
        """The name of the optimizer's class, whatever function makes it."""
        return next(iter(self._rules.values())).made_as

    # ---- what it keeps of no parameter: running values of groups, and attributes

    def _known(self) -> dict[int, Any]:
        """Parameters, which `deep_copy` is to take for copied already."""
        return {id(one.parameter): one.parameter for one in self._stepped.values()}

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The optimizer's groups by number."""
        return dict(zip(self._group_numbers(), self._optimizer.param_groups, strict=True))

    def _attributes(self) -> dict[str, Any]:
        """The attributes that it has beside those of torch's base class."""
        if self._is_known:
            return {}
        plain = vars(torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {})).keys() - {"defaults"}
        return {key: value for key, value in vars(self._optimizer).items() if key not in plain}

    def _beside(self) -> dict[str, dict[str, Any]]:
        """By owner: the values of each group but for its parameters, and the attributes."""
        groups = {
            f"{GROUP}{number}": {key: value for key, value in group.items() if key != "params"}
            for number, group in self._groups().items()
        }
        return {**groups, self._owner: self._attributes()}

    def _shared(self) -> dict[str, dict[Any, Any]]:
        """All that it has written since it was made, by owner, without what rates set."""
        found: dict[str, dict[Any, Any]] = {}
        for owner, values in self._beside().items():
            own = {k: v for k, v in values.items() if owner == self._owner or k not in self._set}
            found[owner] = self._as_made[owner].changed(own, self._names)
        others = {k: v for k, v in self._optimizer.state.items() if id(k) not in self._names}
        if others:
            found[self._owner]["state"] = others
        return {owner: values for owner, values in found.items() if values}

    def _apart(
        self, values: Mapping[Any, Any], parameter: Tensor | None, owner: str, memory: dict[int, str]
    ) -> dict[str, Tensor]:
        """Values as named tensors; `memory` has the names of those whose memory was seen. Raises: ConfigError."""
        whose = "of all parameters" if parameter is None else f"of {owner}"
        try:
            device = torch.device("cpu") if parameter is None else parameter.device
            found = taken_apart(values, self._names, device, parameter)
        except NoForm as error:
            raise ConfigError(f"the optimizer {self._label} keeps {error.key!r} {whose} {error.words}") from None
        for kind, value in found.items():
            other = memory.setdefault(value.untyped_storage()._cdata, f"{kind!r} {whose}")
            # What was never written may as well be copies.
            if other == _PARAMETER or (other != f"{kind!r} {whose}" and value._version):
                raise ConfigError(
                    f"the optimizer {self._label} keeps {kind!r} {whose} in the memory of {other}, which a checkpoint "
                    "cannot hold; it holds tensors that have memory of their own"
                )
        return found

    def _group_numbers(self) -> list[int]:
        """The numbers of the groups of the parameters that this rank steps."""
        return sorted({one.group for one in self._stepped.values()})

    def _made(self, kind: OptimizerKind) -> torch.optim.Optimizer:
        stepped = self._stepped.values()
        groups = [
            {"params": [one.parameter for one in stepped if one.group == number], **self._rules[number].options}
            for number in self._group_numbers()
        ]
        try:
            return with_rates_of_its_own(kind.make(groups))
        except ConfigError:
            raise
        except ValueError as error:
            shapes = {name: tuple(one.place.parameter.shape) for name, one in self._stepped.items()}
            vector = next((f"{name} of shape {shape}" for name, shape in shapes.items() if len(shape) != 2), "")
            raise ConfigError(
                f"the optimizer {self._label} refuses the parameters it is given"
                f"{f', such as {vector}' if vector else ''}: {error}; optimizer.groups can give some another optimizer"
            ) from None


@dataclass(frozen=True, eq=False)
class _Stepped:
    """A parameter that an optimizer of torch steps: a view of a master, in the model's shape where it is whole."""

    group: int
    place: Place
    parameter: nn.Parameter
    #: its values where they lie in the master, and its gradient
    values: Tensor
    gradient: Tensor
    #: the attributes with which it was made
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, block: Block, place: Place) -> _Stepped:
        shape = place.parameter.shape if place.is_whole else (place.last - place.first,)
        values, gradient = (place.view(flat).view(shape) for flat in (block.master, block.gradient))
        parameter = in_place_of(place.parameter, values)
        return cls(block.group, place, parameter, values, gradient, dict(vars(parameter)))


@dataclass(frozen=True, eq=False)
class _Noted:
    """A value as it is now, to see later if it has changed."""

    #: its text, or what pickles to it where it has no form
    form: Any
    #: its tensors; None where it has no form
    tensors: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, value: Any, parameters: Mapping[int, str]) -> _Noted:
        try:
            tensors, text = described({"": value}, parameters)
            return cls(text, tensors)
        except NoForm:
            try:
                return cls(pickle.dumps(value), None)
            except Exception:  # whatever a class of the user's own says
                return cls(None if callable(value) else object(), None)

    def is_same(self, other: _Noted) -> bool:
        if self.form != other.form or (self.tensors is None) != (other.tensors is None):
            return False
        own, theirs = self.tensors or {}, other.tensors or {}
        return own.keys() == theirs.keys() and all(torch.equal(own[path], theirs[path]) for path in own)


def _replace(values: MutableMapping[Any, Any], others: Mapping[Any, Any]) -> None:
    values.clear()
    values.update(others)


def _with_form(values: Mapping[str, Any], parameters: Mapping[int, str]) -> dict[str, Any]:
    """The values that have a form."""
    found = {}
    for key, value in values.items():
        with suppress(NoForm):
            described({key: value}, parameters)
            found[key] = value
    return found


@dataclass(frozen=True, eq=False)
class AsMade:
    """Values as they were made: copies of those that have a form, and notes of all."""

    values: Mapping[str, Any]
    noted: Mapping[str, _Noted]

    @classmethod
    def of(cls, values: Mapping[str, Any], parameters: Mapping[int, str], known: dict[int, Any]) -> AsMade:
        copies = deep_copy(_with_form(values, parameters), known)
        return cls(copies, {key: _Noted.of(copies.get(key, value), parameters) for key, value in values.items()})

    def changed(self, now: Mapping[str, Any], parameters: Mapping[int, str]) -> dict[str, Any]:
        """The values that are others now than then."""
        found = {}
        for key, value in now.items():
            if isinstance(value, _NO_STATE) or (callable(value) and not has_state(value)):
                continue
            before = self.noted.get(key)
            if before is None or not before.is_same(_Noted.of(value, parameters)):
                found[key] = value
        return found


def steppers_for(
    rules: Sequence[GroupRule], blocks: Sequence[Block], is_split: bool
) -> list[FlatStepper | TorchStepper]:
    """The update rules of these blocks, one for each optimizer among the groups.

    is_split: True where several ranks step the model's parameters, each its own.

    Raises: ConfigError for an optimizer that steps all parameters together, where they are split.
    """
    steppers: list[FlatStepper | TorchStepper] = []
    for index, kind in enumerate(dict.fromkeys(rule.kind for rule in rules)):
        rules_of_kind = {number: rule for number, rule in enumerate(rules) if rule.kind is kind}
        blocks_of_kind = [block for block in blocks if block.group in rules_of_kind]
        rule = next(iter(rules_of_kind.values()))
        if is_split and rule.division is Division.MODEL:
            raise ConfigError(
                f'the optimizer {rule.made_as} steps all parameters together (divides = "model"), but several ranks '
                "step parameters here, each its own; it can train with pp = 1, tp = 1, ep = 1 and "
                "optimizer.zero = false"
            )
        if kind.stepper is not None:
            steppers.append(kind.stepper(blocks_of_kind))
        elif any(block.places for block in blocks_of_kind):
            steppers.append(TorchStepper(kind, rules_of_kind, index, blocks_of_kind))
    return steppers
