"""Sharing a model among ranks: parts of its parameters and optimizer state, sums of gradients, and tokens.

Shapes: T tokens of a whole microbatch, R of this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.data import PackedBatch, part_of
from penstock.engine.build import SECOND_COPY
from penstock.engine.optimizer.groups import Division, ParameterGroups
from penstock.engine.optimizer.steppers import OwnedState
from penstock.model import Logits, ModelGroups, Sequences, ShardedLogits, Spread, UnitSpec, cut_sequences
from penstock.parallel import Grid, Reduction, gather_json, gather_uneven
from penstock.parallel.tensor_slice import LocalTensor, Shard, TensorSlice, local_run
from penstock.settings import ConfigError, Layout, ParameterGroup
from penstock.settings.declare import check_argument

UnitSource = Sequence[UnitSpec] | Callable[[ModelGroups], Sequence[UnitSpec]]
"""A model's units, or a function that makes them for the groups that share them."""


def units_for(source: UnitSource, groups: ModelGroups, layout: Layout) -> tuple[UnitSpec, ...]:
    """The units, made for these groups.

    Raises:
        ValueError: they are there already, and the layout wants them shared.
    """
    if callable(source):
        found = source(groups)
        check_argument("units", found, Sequence[UnitSpec])
        return tuple(found)
    if (layout.tp, layout.cp, layout.ep) != (1, 1, 1):
        raise ValueError(
            f"the layout {layout} shares a model over tp, cp or ep, but its units are given ready-made; "
            "give a function that makes them from ModelGroups, or a layout of pp and dp alone"
        )
    return tuple(source)


# ---- parameters


@dataclass(frozen=True)
class Sharding:
    """The sharing of this rank's parameters with other ranks."""

    #: full name -> the part that this rank has; only parameters that ranks share
    shards: Mapping[str, Shard]
    #: full name -> the ranks over which the gradient is summed
    reductions: Mapping[str, Reduction]
    #: full name -> the name under which this rank counts the parameter in the norm of the whole model's gradients,
    #: or None if another rank counts it
    norm_names: Mapping[str, str | None]

    @classmethod
    def of(cls, units: Sequence[UnitSpec], parameters: Iterable[str], grid: Grid) -> Sharding:
        """The sharding of this rank's parameters, given by full name."""
        shards = {unit.full_name(own): shard for unit in units for own, shard in unit.sharding.items()}
        partial = {unit.full_name(own) for unit in units for own in unit.partial}
        own: dict[str, Shard] = {}
        reductions: dict[str, Reduction] = {}
        norm_names: dict[str, str | None] = {}
        for name in parameters:
            # Both copies of a bidirectional model are sharded alike.
            plain = name.removesuffix(SECOND_COPY)
            shard = shards.get(plain)
            over_experts = shard is not None and shard.axis == "ep"
            group = grid.edp_group if over_experts else grid.dp_cp_group
            if plain not in partial:
                reductions[name] = Reduction(group)
            elif shard is None or over_experts:
                reductions[name] = Reduction(group, grid.tp_group)
            else:
                reductions[name] = Reduction(group, grid.tp_group, shard.index, shard.count)
            # Among ranks holding the same part, only the first counts it in the norm.
            counts = (grid.ep_rank == 0 or over_experts) and _is_first_with(shard, grid)
            norm_names[name] = None if not counts else name if shard is None else f"{name}[{shard.index}]"
            if shard is not None:
                own[name] = shard
        return cls(own, reductions, norm_names)

    def lending(self, loans: Mapping[str, str]) -> Sharding:
        """The same, where copies (the keys of `loans`) use another parameter's values and have only a gradient."""
        lent = {name: replace(reduction, lent=name in loans) for name, reduction in self.reductions.items()}
        return replace(self, reductions=lent)

    def with_zero(self, ties: Mapping[str, str], grid: Grid, whole: Mapping[str, int] | None = None) -> Sharding:
        """The same with ZeRO-1: ranks that sum gradients with each other divide the optimizer's state and step.

        ties: full names, copy -> owner. Each tied parameter has a bucket of its own, so that the ranks that hold its
        two copies own the same elements of both. whole: the parameters that are stepped only whole, each by one of the
        ranks, with their numbers of elements.
        """
        tied = ties.keys() | set(ties.values())
        owners = _owners(whole or {}, self.reductions, ties)
        return Sharding(
            self.shards,
            {
                name: replace(
                    reduction,
                    sharded=reduction.group is not None,
                    owner=owners.get(name),
                    alone=name if name in tied else "",
                )
                for name, reduction in self.reductions.items()
            },
            # No two of these ranks step the same elements, so each counts its own, under a name of its own.
            {
                name: f"{name}@{grid.rank}" if _is_first_with(self.shards.get(name), grid) else None
                for name in self.reductions
            },
        )


def stepped_whole(
    parameters: Mapping[str, nn.Parameter], groups: ParameterGroups, shards: Mapping[str, Shard]
) -> dict[str, int]:
    """The parameters that their optimizer steps only whole, each with its number of elements.

    Raises:
        ValueError: tensor- or expert-parallel ranks share one of them, so that none of them has it whole.
    """
    found = {}
    for name, parameter in parameters.items():
        if groups.division(name, parameter) is Division.PARAMETERS:
            if name in shards:
                rule = groups.rules[groups.number(name, parameter)]
                raise ValueError(
                    f"the optimizer {rule.kind.label} steps whole parameters, but {shards[name].axis} ranks share "
                    f"{name}; set {shards[name].axis} = 1, or give it another optimizer"
                )
            found[name] = parameter.numel()
    return found


def _owners(whole: Mapping[str, int], reductions: Mapping[str, Reduction], ties: Mapping[str, str]) -> dict[str, int]:
    """The rank of its group that steps each of these parameters, as evenly as possible by elements.

    Ranks of one group get the same answer, and so do ranks of several that hold the two copies of a tied parameter.
    """
    tied, owners = ties.keys() | set(ties.values()), {}
    loads: dict[int, list[int]] = {}
    for name in sorted(whole, key=lambda name: (-whole[name], name)):
        group = reductions[name].group
        if group is None:
            continue
        if name in tied:
            owners[name] = crc32(ties.get(name, name).encode()) % group.size()
            continue
        load = loads.setdefault(id(group), [0] * group.size())
        owners[name] = load.index(min(load))
        load[owners[name]] += whole[name]
    return owners


def _is_first_with(shard: Shard | None, grid: Grid) -> bool:
    """True if this rank is the first of the tensor-parallel ranks that have the same part."""
    if grid.tp_rank == 0:
        return True
    return shard is not None and shard.axis == "tp" and shard != shard.on(grid.tp_rank - 1, grid.layout.tp)


# ---- state, as slices of whole tensors


def local_parameters(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard]) -> dict[str, LocalTensor]:
    """This rank's parameters by full name, as views."""
    found: dict[str, LocalTensor] = {}
    for name, parameter in parameters.items():
        data = parameter.detach()
        found[name] = {shards[name].part: data} if name in shards else data
    return found


def local_state(owned: Mapping[str, OwnedState], shards: Mapping[str, Shard]) -> dict[str, LocalTensor]:
    """The optimizer state that this rank steps (see `Optimizer.owned_state`), by name, as views."""
    found: dict[str, LocalTensor] = {}
    for name, state in owned.items():
        if state.place is None:
            found[name] = state.values
            continue
        shard = shards.get(state.place.name)
        part = TensorSlice.whole(state.place.parameter.shape) if shard is None else shard.part
        found[name] = local_run(state.values, state.place.first, part)
    return found


# ---- tokens


@dataclass(frozen=True, eq=False)
class ContextShards:
    """This rank's part of every microbatch under context parallelism."""

    #: the ranks that share every sequence, for device tensors
    group: dist.ProcessGroup
    #: the device of this rank's sequences
    device: torch.device

    def shard(self, microbatch: PackedBatch) -> tuple[PackedBatch, Sequences]:
        """This rank's part, cut alike for all keys, and the sequences that units see."""
        spread = self.spread(microbatch)
        return part_of(microbatch, spread.pieces[spread.rank]), Sequences.of_spread(spread, self.device)

    def spread(self, microbatch: PackedBatch) -> Spread:
        """The tokens of every rank; some may have none."""
        pieces = cut_sequences(microbatch.sequence_lengths("tokens"), self.group.size())
        return Spread(self.group.rank(), pieces)

    def whole_logits(self, logits: Logits, microbatch: PackedBatch) -> Logits:
        """The logits of all of the microbatch's tokens; where ranks share the vocabulary, they still do."""
        if isinstance(logits, ShardedLogits):
            return replace(logits, own=self.whole(logits.own, microbatch))
        return self.whole(logits, microbatch)

    def whole(self, x: Tensor, microbatch: PackedBatch) -> Tensor:
        """Gather all ranks' rows [R, ...] in the order of the microbatch's tokens, [T, ...]; all ranks call it."""
        spread = self.spread(microbatch)
        rows = torch.cat(gather_uneven(x, spread.num_tokens, self.group))
        order = torch.cat([spread.rows(rank) for rank in range(spread.num_ranks)])
        return torch.empty_like(rows).index_copy_(0, order.to(x.device), rows)


# ---- Checks of the whole model at construction, in one exchange: replicas begin alike, and each group has parameters


_NUM_NAMED = 4
_ADDED_AT_ONCE = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_whole_model(
    own: Mapping[str, Tensor], shards: Mapping[str, Shard], grid: Grid, groups: Sequence[ParameterGroup]
) -> None:
    """Refuse ranks that begin with other values of one tensor, and groups of the optimizer that no parameter is in.

    All ranks call it with the tensors that they have, by full name.

    Raises:
        ValueError: naming the first such tensor; on all ranks alike.
        ConfigError: with the group's pattern and some parameters' names; on all ranks alike.
    """
    parts = {}
    for name, shard in shards.items():
        group = grid.tp_group if shard.axis == "tp" else grid.ep_group
        parts[name] = f"{shard.axis} {group.rank() if group is not None else 0}"
    view = {
        name: (parts.get(name, ""), tensor.ndim if isinstance(tensor, nn.Parameter) else None, total)
        for (name, tensor), total in zip(own.items(), _sums(list(own.values())), strict=True)
    }
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    dims: dict[str, int] = {}
    for rank, theirs in enumerate(gather_json(view, grid.control)):
        for name, (part, num_dims, total) in theirs.items():
            plain = name.removesuffix(SECOND_COPY)
            first, known = seen.setdefault((plain, part), (rank, total))
            if known != total:
                raise ValueError(
                    f"{name} begins with other values on rank {rank} than on rank {first}, though both hold the same "
                    "part of the model; build the layers from one seed on every rank (torch.manual_seed), or give them "
                    "the same weights"
                )
            if num_dims is not None:
                dims[plain] = num_dims
    for group in groups:
        if not any(group.matches(name, num_dims) for name, num_dims in dims.items()):
            some = ", ".join(islice(dims, _NUM_NAMED))
            raise ConfigError(
                f"optimizer.groups: the pattern {group.pattern!r} matches no "
                f"{'matrix' if group.matrices else 'parameter'} of the model; among its {len(dims)} are {some}"
            )


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's bits, read as whole numbers; 0 without values."""
    found: list[Any] = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
        if not tensor.is_meta:
            # PyTorch widens all that it adds up at once to 64 bits.
            bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
            for part in bits.split(_ADDED_AT_ONCE):
                total += part.sum(dtype=torch.int64)
        found.append(total.cpu())
    return torch.stack(found).tolist() if found else []
