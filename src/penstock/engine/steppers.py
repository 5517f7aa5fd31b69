"""Update rules: each steps flat tensors from their gradients, and owns the state that this takes.

The built-in AdamW runs as one fused kernel over whole buckets. `TorchStepper` runs any optimizer of torch's kind over
the parameters themselves. Norms, clipping, masters, ZeRO, checkpoints and memory estimates follow from what they hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from penstock.engine.parameter_groups import GroupRule, OptimizerKind
from penstock.engine.rates import Values
from penstock.parallel import Place
from penstock.settings import ConfigError


@dataclass(frozen=True, eq=False)
class Block:
    """What a rank steps of one bucket."""

    #: the number of the parameter group
    group: int
    #: the values that are stepped, flat: fp32 or wider
    master: Tensor
    #: their gradients
    gradient: Tensor
    #: the parameters' elements in both
    places: Sequence[Place]


@dataclass(frozen=True, eq=False)
class OwnedState:
    """A state tensor of one parameter, as a view: one value for each of its elements that this rank steps, or a whole.

    `place` is None for a tensor of another shape than the parameter's, such as the number of its steps.
    """

    place: Place | None
    values: Tensor


class Stepper(Protocol):
    """The update rule of an optimizer over the blocks that a rank steps."""

    def step(self, values: Sequence[Values]) -> None:
        """Step all masters from their gradients, in place; `values` are the groups' hyperparameters by number."""
        ...

    def state(self) -> dict[tuple[str, str], OwnedState]:
        """(kind of state, full name) -> the state, to be saved, or loaded in place and then `continue_from`."""
        ...

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        """Go on as if the run had taken this number of updates; `state` is set.

        since: full name -> the number of updates after which a parameter was first stepped, if not the first; those
        of one block have the same.
        """
        ...

    def snapshot(self) -> Callable[[], None]:
        """Copy masters and state as they are before a step; returns a function that puts them back."""
        ...

    @property
    def state_bytes(self) -> int:
        """Memory of the state."""
        ...


class AdamW:
    """AdamW. Source: arXiv 1711.05101, algorithm 2."""

    state_kinds: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    #: what is stepped
    _blocks: Sequence[Block]
    #: by block: running means of its gradients and of their squares
    _states: Sequence[Mapping[str, Tensor]]
    #: by block: the number of its updates, fp32 on its device, as the fused kernel takes it
    _num_updates: Sequence[Tensor]

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._states = [{kind: torch.zeros_like(block.master) for kind in self.state_kinds} for block in blocks]
        self._num_updates = [torch.zeros((), dtype=torch.float32, device=block.master.device) for block in blocks]

    def step(self, values: Sequence[Values]) -> None:
        for group in dict.fromkeys(block.group for block in self._blocks):
            places, own = [i for i, block in enumerate(self._blocks) if block.group == group], values[group]
            # The class torch.optim.AdamW loads the compiler at its first use, which takes a second, and calls this.
            adamw(
                [self._blocks[i].master for i in places],
                [self._blocks[i].gradient for i in places],
                [self._states[i]["exp_avg"] for i in places],
                [self._states[i]["exp_avg_sq"] for i in places],
                [],
                [self._num_updates[i] for i in places],
                fused=True,
                amsgrad=False,
                beta1=own["betas"][0],
                beta2=own["betas"][1],
                lr=own["lr"],
                weight_decay=own["weight_decay"],
                eps=own["eps"],
                maximize=False,
            )

    def state(self) -> dict[tuple[str, str], OwnedState]:
        return {
            (kind, place.name): OwnedState(place, place.view(flat))
            for block, states in zip(self._blocks, self._states, strict=True)
            for kind, flat in states.items()
            for place in block.places
        }

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        for block, number in zip(self._blocks, self._num_updates, strict=True):
            number.fill_(num_updates - max((since.get(place.name, 0) for place in block.places), default=0))

    def snapshot(self) -> Callable[[], None]:
        states = [flat for states in self._states for flat in states.values()]
        return _copied([*(block.master for block in self._blocks), *states, *self._num_updates])

    @property
    def state_bytes(self) -> int:
        return sum(flat.nbytes for states in self._states for flat in states.values())


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
    _pieces: Sequence[_Piece]
    #: None where this rank steps nothing
    _optimizer: torch.optim.Optimizer | None
    #: full name -> state that the optimizer does not have yet
    _prepared: dict[str, dict[str, Any]]
    #: (kind, full name) -> a state that is a number, as a tensor
    _numbers: dict[tuple[str, str], Tensor]

    def __init__(self, kind: OptimizerKind, rules: Mapping[int, GroupRule], blocks: Sequence[Block]) -> None:
        self._kind, self._rules = kind, rules
        self._pieces = [_Piece.of(block, place) for block in blocks for place in block.places]
        self._optimizer = self._made([piece.parameter for piece in self._pieces])
        self._prepared, self._numbers = {}, {}

    def step(self, values: Sequence[Values]) -> None:
        if self._optimizer is None:
            return
        for number, group in zip(self._held(), self._optimizer.param_groups, strict=True):
            group.update(values[number])
        self._optimizer.step()
        self._prepared.clear()

    def state(self) -> dict[tuple[str, str], OwnedState]:
        found = {}
        for piece, own in self._states():
            for kind, value in own.items():
                if isinstance(value, Tensor) and value.shape == piece.parameter.shape:
                    found[kind, piece.place.name] = OwnedState(piece.place, value.view(-1))
                elif isinstance(value, Tensor):
                    found[kind, piece.place.name] = OwnedState(None, value)
                elif isinstance(value, int | float):
                    number = self._numbers.setdefault((kind, piece.place.name), torch.zeros((), dtype=torch.float64))
                    found[kind, piece.place.name] = OwnedState(None, number.fill_(value))
        return found

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        optimizer = self._optimizer
        for piece, own in self._states() if num_updates else []:
            assert optimizer is not None
            name = piece.place.name
            if since.get(name, 0) < num_updates:
                numbers = {kind: self._numbers.get((kind, name)) for kind in own}
                kept = {kind: type(own[kind])(n.item()) for kind, n in numbers.items() if n is not None}
                optimizer.state[piece.parameter] = {**own, **kept}
        self._prepared.clear()

    def snapshot(self) -> Callable[[], None]:
        put_back, optimizer = _copied([piece.parameter for piece in self._pieces]), self._optimizer
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

    def _states(self) -> list[tuple[_Piece, dict[str, Any]]]:
        """The state of each piece, prepared where the optimizer has none yet."""
        if self._optimizer is None:
            return []
        missing = [p for p in self._pieces if not self._optimizer.state.get(p.parameter)]
        if unprepared := [piece for piece in missing if piece.place.name not in self._prepared]:
            scratch = [nn.Parameter(torch.zeros_like(piece.parameter)) for piece in unprepared]
            optimizer = self._made(scratch, unprepared)
            assert optimizer is not None
            for parameter in scratch:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for piece, parameter in zip(unprepared, scratch, strict=True):
                self._prepared[piece.place.name] = dict(optimizer.state[parameter])
        return [
            (piece, self._optimizer.state.get(piece.parameter) or self._prepared[piece.place.name])
            for piece in self._pieces
        ]

    def _held(self, pieces: Sequence[_Piece] | None = None) -> list[int]:
        """The numbers of the groups that these pieces belong to, by default those that this rank steps."""
        return sorted({piece.group for piece in (self._pieces if pieces is None else pieces)})

    def _made(
        self, parameters: Sequence[nn.Parameter], pieces: Sequence[_Piece] | None = None
    ) -> torch.optim.Optimizer | None:
        """An optimizer of these parameters, one for each piece; None without any."""
        pieces = self._pieces if pieces is None else pieces
        if not pieces:
            return None
        groups = [
            {
                "params": [p for p, piece in zip(parameters, pieces, strict=True) if piece.group == number],
                **self._rules[number].options,
            }
            for number in self._held(pieces)
        ]
        try:
            return self._kind.make_torch(groups)
        except ValueError as error:
            shapes = {piece.place.name: tuple(piece.place.parameter.shape) for piece in pieces}
            vector = next((f"{name} of shape {shape}" for name, shape in shapes.items() if len(shape) != 2), "")
            raise ConfigError(
                f"the optimizer {self._kind.label} refuses the parameters it is given"
                f"{f', such as {vector}' if vector else ''}: {error}; optimizer.groups can give some another optimizer"
            ) from None


def _copied(tensors: Sequence[Tensor]) -> Callable[[], None]:
    copies = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, values in zip(tensors, copies, strict=True):
            tensor.copy_(values)

    return put_back


def _copy_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}


@dataclass(frozen=True, eq=False)
class _Piece:
    """A parameter that an optimizer of torch steps: a view of a master, in the model's shape where it is whole."""

    group: int
    place: Place
    parameter: nn.Parameter

    @classmethod
    def of(cls, block: Block, place: Place) -> _Piece:
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
        found.append(AdamW(theirs) if kind.make is None else TorchStepper(kind, own, theirs))
    return found


def state_kinds(rules: Sequence[GroupRule]) -> dict[int, tuple[str, ...]]:
    """The kinds of state that each group's optimizer keeps of a matrix with one value for each element, by number."""
    found = {}
    for number, rule in enumerate(rules):
        found[number] = AdamW.state_kinds if rule.kind.make is None else tuple(_kinds_of(rule, same_shape=True))
    return found


def all_state_kinds(rules: Sequence[GroupRule]) -> set[str]:
    """All kinds of state that the optimizers keep."""
    found = set(AdamW.state_kinds)
    for rule in rules:
        if rule.kind.make is not None:
            found |= _kinds_of(rule, same_shape=False)
    return found


def _kinds_of(rule: GroupRule, same_shape: bool) -> set[str]:
    found: set[str] = set()
    for shape in ((4, 3), (4,)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.zeros(shape)
        try:
            optimizer = rule.kind.make_torch([{"params": [parameter], **rule.options}])
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
