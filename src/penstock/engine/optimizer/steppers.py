"""Update rules of the package's own, which step flat tensors from their gradients, and the interface of all rules.

Another rule is another `FlatStepper` here, entered in `STEPPERS`. Norms, clipping, masters, ZeRO, checkpoints and
memory estimates follow from the state it names. `torch_steppers` runs any optimizer of torch's kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from penstock.parallel import Place

Values = Mapping[str, Any]
"""A group's hyperparameters under torch's names: `lr`, `weight_decay`, `betas` and the like."""


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class BlockState:
    """A block, and what a rule keeps of it from step to step."""

    block: Block
    #: kind of state -> one value for each element of the master, 0 at first
    values: Mapping[str, Tensor]
    #: the number of its updates, fp32 on its device, for a rule that counts them
    num_updates: Tensor


class FlatStepper(ABC):
    """A rule that steps each element by itself, so over flat buckets, whole or in parts."""

    #: the kinds of state that it keeps of each element
    state_kinds: ClassVar[tuple[str, ...]]
    #: the hyperparameters that it takes beside `lr`, with their defaults
    hyperparameters: ClassVar[Values]
    #: what is stepped, all of it and by group
    _states: Sequence[BlockState]
    _by_group: Mapping[int, Sequence[BlockState]]

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._states = [
            BlockState(
                block,
                {kind: torch.zeros_like(block.master) for kind in self.state_kinds},
                torch.zeros((), dtype=torch.float32, device=block.master.device),
            )
            for block in blocks
        ]
        numbers = dict.fromkeys(state.block.group for state in self._states)
        self._by_group = {n: [state for state in self._states if state.block.group == n] for n in numbers}

    @abstractmethod
    def step_group(self, states: Sequence[BlockState], values: Values) -> None:
        """Step the masters of one group's blocks and their state, in place, by the group's hyperparameters."""

    def step(self, values: Sequence[Values]) -> None:
        for group, states in self._by_group.items():
            self.step_group(states, values[group])

    def state(self) -> dict[tuple[str, str], OwnedState]:
        return {
            (kind, place.name): OwnedState(place, place.view(flat))
            for state in self._states
            for kind, flat in state.values.items()
            for place in state.block.places
        }

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        for state in self._states:
            first = max((since.get(place.name, 0) for place in state.block.places), default=0)
            state.num_updates.fill_(num_updates - first)

    def snapshot(self) -> Callable[[], None]:
        return copied(
            [t for state in self._states for t in (state.block.master, *state.values.values(), state.num_updates)]
        )

    @property
    def state_bytes(self) -> int:
        return sum(flat.nbytes for state in self._states for flat in state.values.values())


class AdamW(FlatStepper):
    """AdamW, as one fused kernel over all blocks of a group. Source: arXiv 1711.05101, algorithm 2."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    hyperparameters: ClassVar[Values] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

    def step_group(self, states: Sequence[BlockState], values: Values) -> None:
        # The class torch.optim.AdamW loads the compiler at its first use, which takes a second, and calls this.
        adamw(
            [state.block.master for state in states],
            [state.block.gradient for state in states],
            [state.values["exp_avg"] for state in states],
            [state.values["exp_avg_sq"] for state in states],
            [],
            [state.num_updates for state in states],
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


def copied(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Copy the values of tensors; returns a function that puts them back."""
    copies = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, values in zip(tensors, copies, strict=True):
            tensor.copy_(values)

    return put_back
