"""Update rules of torch.optim's kind, run over the parameters themselves; and the rules that a model's groups need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.optimizer.groups import GroupRule, OptimizerKind
from penstock.engine.optimizer.steppers import Block, OwnedState, Stepper, Values, copied
from penstock.parallel import Place
from penstock.settings import ConfigError


class TorchStepper:
    """Any optimizer of torch's kind, over the parameters in their shapes, or over flat parts of them.

    What the optimizer makes at its first step, its state, is also made by a step of a scratch copy where it is asked
    for before: its tensors are then loaded in place, and handed to the optimizer by `continue_from`.
    """

    #: makes the optimizer
    _kind: OptimizerKind
    #: the optimizer's groups by number
    _rules: Mapping[int, GroupRule]
    #: what is stepped
    _stepped: Sequence[_Stepped]
    #: None where this rank steps nothing
    _optimizer: torch.optim.Optimizer | None
    #: full name -> state that the optimizer does not have yet
    _prepared: dict[str, dict[str, Any]]
    #: (kind, full name) -> a state that is a number, as a tensor
    _numbers: dict[tuple[str, str], Tensor]

    def __init__(self, kind: OptimizerKind, rules: Mapping[int, GroupRule], blocks: Sequence[Block]) -> None:
        self._kind, self._rules = kind, rules
        self._stepped = [_Stepped.of(block, place) for block in blocks for place in block.places]
        self._optimizer = self._made([one.parameter for one in self._stepped])
        self._prepared, self._numbers = {}, {}

    def step(self, values: Sequence[Values]) -> None:
        if self._optimizer is None:
            return
        for number, group in zip(self._group_numbers(), self._optimizer.param_groups, strict=True):
            group.update(values[number])
        self._optimizer.step()
        self._prepared.clear()

    def state(self) -> dict[tuple[str, str], OwnedState]:
        found = {}
        for one, own in self._states():
            for kind, value in own.items():
                if isinstance(value, Tensor) and value.shape == one.parameter.shape:
                    found[kind, one.place.name] = OwnedState(one.place, value.view(-1))
                elif isinstance(value, Tensor):
                    found[kind, one.place.name] = OwnedState(None, value)
                elif isinstance(value, int | float):
                    number = self._numbers.setdefault((kind, one.place.name), torch.zeros((), dtype=torch.float64))
                    found[kind, one.place.name] = OwnedState(None, number.fill_(value))
        return found

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        optimizer = self._optimizer
        for one, own in self._states() if num_updates else []:
            assert optimizer is not None
            name = one.place.name
            if since.get(name, 0) < num_updates:
                numbers = {kind: self._numbers.get((kind, name)) for kind in own}
                kept = {kind: type(own[kind])(n.item()) for kind, n in numbers.items() if n is not None}
                optimizer.state[one.parameter] = {**own, **kept}
        self._prepared.clear()

    def snapshot(self) -> Callable[[], None]:
        put_back, optimizer = copied([one.parameter for one in self._stepped]), self._optimizer
        if optimizer is None:
            return put_back
        states = {parameter: _copy_of(own) for parameter, own in optimizer.state.items()}
        # Some keep running values in their groups.
        groups = [_copy_of({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

        def restore() -> None:
            put_back()
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.update(own)

        return restore

    @property
    def state_bytes(self) -> int:
        return sum(state.values.nbytes for state in self.state().values())

    def _states(self) -> list[tuple[_Stepped, dict[str, Any]]]:
        """The state of each parameter, prepared where the optimizer has none yet."""
        if self._optimizer is None:
            return []
        missing = [p for p in self._stepped if not self._optimizer.state.get(p.parameter)]
        if unprepared := [one for one in missing if one.place.name not in self._prepared]:
            scratch = [nn.Parameter(torch.zeros_like(one.parameter)) for one in unprepared]
            optimizer = self._made(scratch, unprepared)
            assert optimizer is not None
            for parameter in scratch:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for one, parameter in zip(unprepared, scratch, strict=True):
                self._prepared[one.place.name] = dict(optimizer.state[parameter])
        return [
            (one, self._optimizer.state.get(one.parameter) or self._prepared[one.place.name]) for one in self._stepped
        ]

    def _group_numbers(self, stepped: Sequence[_Stepped] | None = None) -> list[int]:
        """The numbers of the groups of these parameters, by default those that this rank steps."""
        return sorted({one.group for one in (self._stepped if stepped is None else stepped)})

    def _made(
        self, parameters: Sequence[nn.Parameter], stepped: Sequence[_Stepped] | None = None
    ) -> torch.optim.Optimizer | None:
        """An optimizer of these parameters, one for each; None without any."""
        stepped = self._stepped if stepped is None else stepped
        if not stepped:
            return None
        groups = [
            {
                "params": [p for p, one in zip(parameters, stepped, strict=True) if one.group == number],
                **self._rules[number].options,
            }
            for number in self._group_numbers(stepped)
        ]
        try:
            return self._kind.make(groups)
        except ValueError as error:
            shapes = {one.place.name: tuple(one.place.parameter.shape) for one in stepped}
            vector = next((f"{name} of shape {shape}" for name, shape in shapes.items() if len(shape) != 2), "")
            raise ConfigError(
                f"the optimizer {self._kind.label} refuses the parameters it is given"
                f"{f', such as {vector}' if vector else ''}: {error}; optimizer.groups can give some another optimizer"
            ) from None


def _copy_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}


@dataclass(frozen=True, eq=False)
class _Stepped:
    """A parameter that an optimizer of torch steps: a view of a master, in the model's shape where it is whole."""

    group: int
    place: Place
    parameter: nn.Parameter

    @classmethod
    def of(cls, block: Block, place: Place) -> _Stepped:
        shape = place.parameter.shape if place.is_whole else (place.last - place.first,)
        parameter = nn.Parameter(place.view(block.master).view(shape))
        parameter.grad = place.view(block.gradient).view(shape)
        return cls(block.group, place, parameter)


def steppers_for(rules: Sequence[GroupRule], blocks: Sequence[Block]) -> list[Stepper]:
    """The update rules of these blocks, one for each optimizer among the groups."""
    found: list[Stepper] = []
    for kind in dict.fromkeys(rule.kind for rule in rules):
        own = {number: rule for number, rule in enumerate(rules) if rule.kind is kind}
        theirs = [block for block in blocks if block.group in own]
        found.append(TorchStepper(kind, own, theirs) if kind.stepper is None else kind.stepper(theirs))
    return found


def state_kinds(rules: Sequence[GroupRule]) -> dict[int, tuple[str, ...]]:
    """The kinds of state that each group's optimizer keeps of a matrix with one value for each element, by number."""
    return {number: tuple(_kinds_of(rule, same_shape=True)) for number, rule in enumerate(rules)}


def all_state_kinds(rules: Sequence[GroupRule]) -> set[str]:
    """All kinds of state that the optimizers keep."""
    return {kind for rule in rules for kind in _kinds_of(rule, same_shape=False)}


def _kinds_of(rule: GroupRule, same_shape: bool) -> set[str]:
    if rule.kind.stepper is not None:
        return set(rule.kind.stepper.state_kinds)
    found: set[str] = set()
    for shape in ((4, 3), (4,)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.zeros(shape)
        try:
            optimizer = rule.kind.make([{"params": [parameter], **rule.options}])
            optimizer.step()
        except ValueError:
            # Some take only matrices.
            continue
        found |= {
            kind
            for kind, value in optimizer.state[parameter].items()
            if value is not None and (not same_shape or (isinstance(value, Tensor) and value.shape == parameter.shape))
        }
        if same_shape:
            break
    return found
