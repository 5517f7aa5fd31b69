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


def agree_on_trained(
    parameters: Mapping[str, nn.Parameter], ties: Mapping[str, str], group: dist.ProcessGroup | None
) -> set[str]:
    """The full names of all parameters that require a gradient, on any rank; all ranks call it with their own.

    ties: full names of parameters, copy -> owner.

    Raises:
        ValueError: ranks disagree on a parameter, or one is frozen without the parameter it is tied to; on all ranks
            alike.
    """
    own = {name: int(parameter.requires_grad) for name, parameter in parameters.items()}
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
            raise ValueError(f"{frozen} is frozen, but {other}, to which it is tied, is not; freeze both or neither")
    return {name for name, (_, value) in trained.items() if value}


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
            reduction = optimizer.reductions.get(name.split(".", 2)[2])
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
                # All but one rank's values are zero bits, so the sum is exact.
                flat = whole.reshape(-1).view(torch.uint8)
                dist.all_reduce(flat, group=reduction.group)
                whole.copy_(flat.view(whole.dtype).view(whole.shape))
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


def _ranks(members: dist.ProcessGroup | None, group: dist.ProcessGroup) -> Sequence[int]:
    """The members of a part of a group, as ranks of the group; this rank's own without one."""
    if members is None:
        return [group.rank()]
    return [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(members)]
