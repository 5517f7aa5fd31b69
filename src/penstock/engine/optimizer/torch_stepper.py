"""Any optimizer of torch's kind, over the parameters that a rank steps, and its state by their names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from penstock.engine.optimizer.state import (
    FORM,
    GROUP,
    OPTIMIZER,
    WIDE,
    copied,
    from_tensors,
    keeps_type,
    num_bytes,
    to_tensors,
)
from penstock.engine.optimizer.steppers import (
    Block,
    GroupRule,
    OptimizerKind,
    OwnedState,
    StateName,
    States,
    Stepper,
    Stored,
    Values,
    known_division,
    scale,
)
from penstock.parallel import Place
from penstock.parallel.gradients import in_place_of
from penstock.settings import ConfigError

_logger = logging.getLogger(__name__)


class TorchStepper(Stepper):
    """An optimizer of torch's kind, over the parameters in their shapes, or over flat parts of them.

    Its state is its `state_dict`: of each parameter by name, of each group by number, and whatever else it holds there.
    """

    #: the optimizer's groups by number
    _rules: Mapping[int, GroupRule]
    #: stands for a parameter in the names of state that belongs to the whole optimizer
    _owner: str
    #: what is stepped, by name
    _stepped: Mapping[str, _Stepped]
    _optimizer: torch.optim.Optimizer
    #: True for one of torch or torchao, which leaves gradients and the memory of parameters as they are
    _is_known: bool

    def __init__(
        self, kind: OptimizerKind, rules: Mapping[int, GroupRule], number: int, blocks: Sequence[Block]
    ) -> None:
        self._rules, self._owner = rules, f"{OPTIMIZER}{number}"
        self._stepped = {place.name: _Stepped.of(block, place) for block in blocks for place in block.places}
        self._optimizer = self._made(kind)
        self._is_known = known_division(self._optimizer) is not None

    def step(self, values: Sequence[Values], factor: float = 1.0) -> None:
        scale((one.gradient for one in self._stepped.values()), factor)
        for number, group in zip(self._group_numbers(), self._optimizer.param_groups, strict=True):
            for key, value in values[number].items():
                # As torch's schedulers do.
                group[key].fill_(value) if isinstance(group.get(key), Tensor) else group.update({key: value})
        for one in self._stepped.values():
            # A user's own may keep its gradients, as it may where a plain loop sets them to None.
            one.parameter.grad = one.gradient if self._is_known else one.gradient.clone()
        self._optimizer.step()
        for one in self._stepped.values():
            one.parameter.grad = None
            if self._is_known:
                continue
            if one.parameter.data_ptr() != one.values.data_ptr() or one.parameter.stride() != one.values.stride():
                one.values.copy_(one.parameter)
                one.parameter.data = one.values

    # ---- its state

    def state(self) -> States:
        states: dict[StateName, OwnedState] = {}
        for owner, values in self._by_owner().items():
            one = self._stepped.get(owner)
            try:
                tensors = to_tensors(values, one and one.parameter)
            except TypeError as error:
                whose = "the whole optimizer" if owner == self._owner else owner
                raise ConfigError(
                    f"the optimizer {self._label} has state of {whose} that no checkpoint can hold, {error}"
                ) from None
            for kind, tensor in tensors.items():
                is_like = one is not None and kind != FORM and tensor.shape == one.parameter.shape
                state = OwnedState(one.place, tensor.reshape(-1)) if one and is_like else OwnedState(None, tensor)
                states[kind, owner] = state
        return states

    def allocate_for(self, stored: Mapping[StateName, Stored]) -> States:
        allocated: dict[StateName, OwnedState] = {}
        owners = {self._owner, *(f"{GROUP}{number}" for number in self._group_numbers())}
        for (kind, owner), (dtype, shape) in stored.items():
            if (one := self._stepped.get(owner)) is not None and shape is None:
                # The precision may be another one than that of the run that was saved.
                dtype = one.parameter.dtype if dtype in WIDE and not keeps_type(kind) else dtype
                values = torch.zeros(one.parameter.numel(), dtype=dtype, device=one.parameter.device)
                allocated[kind, owner] = OwnedState(one.place, values)
            elif one is not None or owner in owners:
                assert shape is not None
                allocated[kind, owner] = OwnedState(None, torch.zeros(shape, dtype=dtype))
        return allocated

    def load_state(self, state: States | None, num_updates: int, num_missed: Mapping[str, int]) -> None:
        if state is None:
            return
        tensors: dict[str, dict[str, Tensor]] = {}
        for (kind, owner), one in state.items():
            shaped = one.place is not None
            values = one.values.view(self._stepped[owner].parameter.shape) if shaped else one.values
            tensors.setdefault(owner, {})[kind] = values
        by_owner = {owner: from_tensors(of_owner) for owner, of_owner in tensors.items()}
        now, others = self._optimizer.state_dict(), by_owner.pop(self._owner, {})
        of_none = others.pop("state", {})
        if unknown := sorted(str(key) for key in others.keys() - now.keys()):
            _logger.warning(
                "the checkpoint's %s of the optimizer %s is passed over, since its state_dict has no such key",
                ", ".join(unknown),
                self._label,
            )
        groups = [
            group | by_owner.get(f"{GROUP}{number}", {})
            for number, group in zip(self._group_numbers(), now["param_groups"], strict=True)
        ]
        of_order = {index: by_owner[name] for index, name in enumerate(self._order()) if name in by_owner}
        known = {key: value for key, value in others.items() if key in now}
        self._load_dict({**now, **known, "state": of_none | of_order, "param_groups": groups})

    def snapshot(self) -> Callable[[], None]:
        values = [(one, one.values.clone()) for one in self._stepped.values()]
        state = copied(self._optimizer.state_dict())

        def restore() -> None:
            for one, before in values:
                one.parameter.data = one.values
                one.values.copy_(before)
            self._load_dict(state)

        return restore

    @property
    def state_bytes(self) -> int:
        return num_bytes(list(self._optimizer.state.values()))

    def _by_owner(self) -> dict[str, dict[Any, Any]]:
        """Its state dict by owner: the names of parameters, the numbers of groups, and the optimizer itself."""
        state_dict, order = dict(self._optimizer.state_dict()), self._order()
        state, groups = state_dict.pop("state"), state_dict.pop("param_groups")
        by_owner = {order[index]: values for index, values in state.items() if index in range(len(order))}
        for number, group in zip(self._group_numbers(), groups, strict=True):
            by_owner[f"{GROUP}{number}"] = {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            }
        of_none = {key: values for key, values in state.items() if key not in range(len(order))}
        by_owner[self._owner] = state_dict | ({"state": of_none} if of_none else {})
        return by_owner

    def _load_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, which the optimizer may keep."""
        optimizer = self._optimizer
        optimizer.load_state_dict(state_dict)
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            return
        for index, name in enumerate(self._order()):
            if index in state_dict["state"]:
                parameter = self._stepped[name].parameter
                # As it was saved, on the device where it was loaded: torch casts to the parameter's type, codes too.
                optimizer.state[parameter] = tree_map(
                    lambda saved, loaded: saved.to(loaded.device) if isinstance(saved, Tensor) else loaded,
                    state_dict["state"][index],
                    optimizer.state[parameter],
                )

    def _order(self) -> list[str]:
        """The parameters' names in the order in which a state dict numbers them."""
        names = {id(one.parameter): name for name, one in self._stepped.items()}
        return [names[id(parameter)] for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def _label(self) -> str:
        """The name of the optimizer's class, whatever function makes it."""
        return next(iter(self._rules.values())).made_as

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
            return kind.optimizer(groups)
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

    @classmethod
    def of(cls, block: Block, place: Place) -> _Stepped:
        shape = place.parameter.shape if place.is_whole else (place.last - place.first,)
        values, gradient = (place.view(flat).view(shape) for flat in (block.master, block.gradient))
        return cls(block.group, place, in_place_of(place.parameter, values), values, gradient)
