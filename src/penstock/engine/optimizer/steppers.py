"""Update rules: of the package's own, which step flat tensors, and any optimizer of torch's kind.

Another rule of its own is another `FlatStepper` here, entered in `STEPPERS`. Norms, clipping, masters, ZeRO,
checkpoints and memory estimates follow from the state it names.
"""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from penstock.parallel import Place
from penstock.parallel.gradients import as_real
from penstock.settings import ConfigError
from penstock.settings.training import Course

Values = Mapping[str, Any]
"""A group's hyperparameters under torch's names: `lr`, `weight_decay`, `betas` and the like."""


@dataclass(eq=False)
class Block:
    """The part of one bucket that a rank steps."""

    #: the number of the parameter group
    group: int
    #: the values that are stepped, flat: fp32 or wider
    master: Tensor
    #: their gradients
    gradient: Tensor
    #: the parameters' elements in both
    places: Sequence[Place]
    #: what a `FlatStepper` keeps: kind of state -> one value for each element of the master, 0 at first
    state: Mapping[str, Tensor] = field(default_factory=dict)
    #: the number of its updates, fp32 on its device, for a rule that counts them
    num_updates: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.num_updates = torch.zeros((), dtype=torch.float32, device=self.master.device)


@dataclass(frozen=True, eq=False)
class OwnedState:
    """A state tensor of one parameter, as a view: one value for each of its elements that this rank steps, or a whole.

    `place` is None for a tensor of another shape than the parameter's, such as the number of its steps.
    """

    place: Place | None
    values: Tensor


class FlatStepper(ABC):
    """A rule that steps each element by itself, so over flat buckets, whole or in parts."""

    #: the kinds of state that it keeps of each element
    state_kinds: ClassVar[tuple[str, ...]]
    #: the hyperparameters that it takes beside `lr`, with their defaults
    hyperparameters: ClassVar[Values]
    #: what is stepped
    _blocks: Sequence[Block]

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        for block in blocks:
            block.state = {kind: torch.zeros_like(block.master) for kind in self.state_kinds}

    @abstractmethod
    def step_group(self, blocks: Sequence[Block], values: Values) -> None:
        """Step the masters of one group's blocks and their state, in place, by the group's hyperparameters."""

    def step(self, values: Sequence[Values]) -> None:
        """Step all masters from their gradients, in place; `values` are the groups' hyperparameters by number."""
        for group in dict.fromkeys(block.group for block in self._blocks):
            self.step_group([block for block in self._blocks if block.group == group], values[group])

    def state(self) -> dict[tuple[str, str], OwnedState]:
        """(kind of state, full name) -> the state, to be saved, or loaded in place and then `continue_from`."""
        return {
            (kind, place.name): OwnedState(place, place.view(flat))
            for block in self._blocks
            for kind, flat in block.state.items()
            for place in block.places
        }

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        """Go on as if the run had taken this number of updates; `state` is set.

        since: full name -> the number of updates after which a parameter was first stepped, if not the first; those
        of one block have the same.
        """
        for block in self._blocks:
            first = max((since.get(place.name, 0) for place in block.places), default=0)
            block.num_updates.fill_(num_updates - first)

    def snapshot(self) -> Callable[[], None]:
        """Copy masters and state as they are before a step; returns a function that puts them back."""
        return _copied([t for block in self._blocks for t in (block.master, *block.state.values(), block.num_updates)])

    @property
    def state_bytes(self) -> int:
        """Memory of the state."""
        return sum(flat.nbytes for block in self._blocks for flat in block.state.values())


class AdamW(FlatStepper):
    """AdamW, as one fused kernel over all blocks of a group. Source: arXiv 1711.05101, algorithm 2."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    hyperparameters: ClassVar[Values] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

    def step_group(self, blocks: Sequence[Block], values: Values) -> None:
        # The class torch.optim.AdamW loads the compiler at its first use, which takes a second, and calls this.
        adamw(
            [as_real(block.master) for block in blocks],
            [as_real(block.gradient) for block in blocks],
            [as_real(block.state["exp_avg"]) for block in blocks],
            [as_real(block.state["exp_avg_sq"]) for block in blocks],
            [],
            [block.num_updates for block in blocks],
            fused=True,
            amsgrad=False,
            beta1=values["betas"][0],
            beta2=values["betas"][1],
            lr=values["lr"],
            weight_decay=values["weight_decay"],
            eps=values["eps"],
            maximize=False,
        )


STEPPERS: dict[str, type[FlatStepper]] = {"adamw": AdamW}
"""`optimizer.name` -> its rule here, which takes the place of a class of torch.optim unless that is given arguments."""


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


def _agree(one: Tensor, other: Tensor, before: Tensor) -> bool:
    """True if two updates of the same values are equal up to rounding."""
    update = (one - before).norm()
    return bool((one - other).norm() <= _PROBE_TOLERANCE * update)


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
        put_back, optimizer = _copied([one.parameter for one in self._stepped]), self._optimizer
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


def steppers_for(rules: Sequence[GroupRule], blocks: Sequence[Block]) -> list[FlatStepper | TorchStepper]:
    """The update rules of these blocks, one for each optimizer among the groups."""
    found: list[FlatStepper | TorchStepper] = []
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


def _copied(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Copy the values of tensors; returns a function that puts them back."""
    copies = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, values in zip(tensors, copies, strict=True):
            tensor.copy_(values)

    return put_back
