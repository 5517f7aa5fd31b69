"""Freezing and thawing: which parameters are trained, and the move of their optimizer state when that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.optimizer.optimizer import Optimizer
from penstock.engine.optimizer.steppers import OwnedState
from penstock.parallel import gather_json


class TrainedParameters:
    """Remembers which parameters of this rank required a gradient when it was last asked."""

    #: full name -> the parameter
    parameters: Mapping[str, nn.Parameter]
    #: by parameter, in order
    _trained: list[bool]

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._trained = self._now()

    @property
    def changed(self) -> bool:
        """True if a parameter was frozen or thawed since `agree`."""
        return self._now() != self._trained

    def agree(self, ties: Mapping[str, str], group: dist.ProcessGroup | None) -> set[str]:
        """Compare with all ranks, which all call it; returns the names of all that is trained, on any rank.

        ties: full names of parameters, copy -> owner.

        Raises:
            ValueError: ranks disagree on a parameter, or one is frozen without the parameter it is tied to; on all
                ranks alike.
        """
        own = {name: int(parameter.requires_grad) for name, parameter in self.parameters.items()}
        trained: dict[str, tuple[int, int]] = {}
        for rank, theirs in enumerate(gather_json(own, group)):
            for name, value in theirs.items():
                other, known = trained.setdefault(name, (rank, value))
                if known != value:
                    raise ValueError(
                        f"{name} requires a gradient on rank {rank if value else other} and none on rank "
                        f"{other if value else rank}; freeze it on every rank that holds it, or on none"
                    )
        for copy, owner in sorted(ties.items()):
            if copy in trained and owner in trained and trained[copy][1] != trained[owner][1]:
                frozen, other = (owner, copy) if trained[copy][1] else (copy, owner)
                raise ValueError(
                    f"{frozen} is frozen, but {other}, to which it is tied, is not; freeze both or neither"
                )
        self._trained = self._now()
        return {name for name, (_, value) in trained.items() if value}

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]


@dataclass(frozen=True, eq=False)
class WholeState:
    """The optimizer's state of this rank's parameters, whole although ranks step them in parts."""

    #: ``optimizer.<kind>.<parameter>`` -> True if it has one value for each of the parameter's elements, and the tensor
    tensors: Mapping[str, tuple[bool, Tensor]]

    @classmethod
    def of(cls, optimizer: Optimizer, device: torch.device, group: dist.ProcessGroup | None) -> WholeState:
        """Collect the state; all ranks of `group`, which hold the model between them, call it at one point."""
        owned = optimizer.owned_state()
        if not optimizer.config.zero or group is None:
            return cls({name: (state.place is not None, state.values.clone()) for name, state in owned.items()})
        by_rank = gather_json({name: _described(state) for name, state in owned.items()}, group)
        found = {}
        for name in sorted({name for theirs in by_rank for name in theirs}):
            reduction = optimizer.reductions.get(_parameter(name))
            holders = (
                [] if reduction is None else [rank for rank in _ranks(reduction.group, group) if name in by_rank[rank]]
            )
            if reduction is None or not holders:
                continue
            known = by_rank[holders[0]][name]
            # A tensor of another shape is the same on every rank that has it.
            counts = known["elements"] or holders[0] == group.rank()
            whole = _whole(owned.get(name) if counts else None, known, device)
            if reduction.group is not None:
                _sum_bits(whole, reduction.group)
            found[name] = known["elements"], whole
        return cls(found)

    def give(self, optimizer: Optimizer) -> None:
        """Copy what another optimizer steps into its state; what is not known here stays as it is."""
        for name, state in optimizer.owned_state().items():
            if name in self.tensors:
                elements, whole = self.tensors[name]
                assert elements == (state.place is not None), f"{name} has changed its form"
                own = whole.view(-1)[state.place.first : state.place.last] if state.place is not None else whole
                state.values.copy_(own)


def _parameter(state_name: str) -> str:
    """The parameter's name in that of its state."""
    return state_name.split(".", 2)[2]


def _described(state: OwnedState) -> dict[str, Any]:
    place = state.place
    shape = list(state.values.shape) if place is None else [place.parameter.numel()]
    return {"elements": place is not None, "shape": shape, "dtype": str(state.values.dtype).removeprefix("torch.")}


def _whole(own: OwnedState | None, known: Mapping[str, Any], device: torch.device) -> Tensor:
    """The whole tensor with this rank's values, and zero bits elsewhere."""
    whole = torch.zeros(known["shape"], dtype=getattr(torch, known["dtype"]), device=device)
    if own is not None:
        place = own.place
        (whole if place is None else whole[place.first : place.last]).copy_(own.values)
    return whole


def _sum_bits(whole: Tensor, group: dist.ProcessGroup) -> None:
    """Join the ranks' values, of which all but one rank's are zero bits, in place and exactly."""
    flat = whole.reshape(-1).view(torch.uint8)
    dist.all_reduce(flat, group=group)
    whole.copy_(flat.view(whole.dtype).view(whole.shape))


def _ranks(members: dist.ProcessGroup | None, group: dist.ProcessGroup) -> Sequence[int]:
    """The members of a part of a group, as ranks of the group; this rank's own without one."""
    if members is None:
        return [group.rank()]
    return [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(members)]
