"""Parameters that several layers or ranks hold: ties between copies, and shards of one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from torch import nn

from penstock import schedule
from penstock.engine.optimizer.groups import ParameterGroups
from penstock.model import UnitSpec
from penstock.parallel import Grid, Reduction
from penstock.parallel.tensor_slice import Shard
from penstock.settings import Division

SECOND_COPY = "@2"
"""Ends the names of the second copy of a bidirectional model."""


# ---- Ties


@dataclass(frozen=True)
class Ties:
    """Parameters that are one logical parameter, by full name: copy -> original.

    Their gradients are summed in two rounds. In a bidirectional model second copies are added to the first ones;
    then each rank adds up the two ends of a tied weight that it holds, which belong to different copies.
    """

    #: first round: the second copy of every parameter of a bidirectional model
    copies: Mapping[str, str]
    #: second round: a weight that two units share
    tied: Mapping[str, str]
    #: every copy -> the parameter that counts, in norms and in checkpoints
    originals: Mapping[str, str]

    @classmethod
    def of(cls, units: Sequence[UnitSpec], parameters: Iterable[str], num_routes: int) -> Ties:
        """The ties of a model, given this rank's parameters by full name."""
        tied = {unit.full_name(copy): original for unit in units for copy, original in unit.tied.items()}
        if num_routes == 1:
            return cls({}, tied, tied)
        copies = {name: name.removesuffix(SECOND_COPY) for name in parameters if name.endswith(SECOND_COPY)}
        copies |= {f"{name}{SECOND_COPY}": name for name in parameters if not name.endswith(SECOND_COPY)}
        crossed = {name: f"{original}{SECOND_COPY}" for name, original in tied.items()}
        crossed |= {f"{name}{SECOND_COPY}": original for name, original in tied.items()}
        originals = {copy: tied.get(original, original) for copy, original in copies.items()} | tied
        return cls(copies, crossed, originals)

    def loans(self, parameters: Iterable[str]) -> dict[str, str]:
        """Tied copies that lie beside their original, among these parameters: copy -> original. One weight serves both.

        A bidirectional model has none: sums over ranks tie its copies together.
        """
        local = set(parameters)
        ties = {} if self.copies else self.tied
        return {copy: original for copy, original in ties.items() if {copy, original} <= local}


def check_ties(units: Sequence[UnitSpec], cut: Sequence[range], placement: schedule.Placement) -> None:
    """Refuse ties that no group of ranks can add up: all copies lie on one rank, their original there or on its mirror.

    Raises: ValueError naming the original and the ranks.
    """
    rank_of = {units[i].name: placement.rank_of(stage) for stage, positions in enumerate(cut) for i in positions}
    ranks_of_copies: dict[str, set[int]] = {}
    for unit in units:
        for original in unit.tied.values():
            ranks_of_copies.setdefault(original, set()).add(rank_of[unit.name])
    for original, copy_ranks in ranks_of_copies.items():
        home = next(rank for name, rank in rank_of.items() if original.startswith(f"{name}."))
        if not any(copy_ranks == {rank} for rank in (home, placement.num_ranks - 1 - home)):
            ranks = ", ".join(map(str, sorted({home, *copy_ranks})))
            raise ValueError(
                f"{original} is shared by layers on the ranks {ranks}; a weight can be shared by layers of one rank, "
                "or of one rank and its mirror, such as the first and the last; schedule.cut moves layers"
            )


# ---- Shards


@dataclass(frozen=True)
class Sharding:
    """The parts of parameters that this rank has, and the ranks with which it sums gradients."""

    #: full name -> this rank's part, for parameters that are divided
    shards: Mapping[str, Shard]
    #: full name -> the ranks over which the gradient is summed
    reductions: Mapping[str, Reduction]
    #: full name -> the name under which this rank counts the parameter in the norm of the whole model's gradients,
    #: or None if another rank counts it
    norm_names: Mapping[str, str | None]

    @classmethod
    def of(cls, units: Sequence[UnitSpec], parameters: Iterable[str], grid: Grid) -> Sharding:
        """The sharding of this rank's parameters, given by full name."""
        shards = {unit.full_name(key): shard for unit in units for key, shard in unit.sharding.items()}
        partial = {unit.full_name(key) for unit in units for key in unit.partial}
        rank_shards: dict[str, Shard] = {}
        reductions: dict[str, Reduction] = {}
        norm_names: dict[str, str | None] = {}
        for name in parameters:
            # Both copies of a bidirectional model are sharded alike.
            first_name = name.removesuffix(SECOND_COPY)
            shard = shards.get(first_name)
            over_experts = shard is not None and shard.axis == "ep"
            group = grid.edp_group if over_experts else grid.dp_cp_group
            if first_name not in partial:
                reductions[name] = Reduction(group)
            elif shard is None or over_experts:
                reductions[name] = Reduction(group, grid.tp_group)
            else:
                reductions[name] = Reduction(group, grid.tp_group, shard.index, shard.count)
            # Among ranks holding the same part, only the first counts it in the norm.
            counts = (grid.ep_rank == 0 or over_experts) and _is_first_with(shard, grid)
            norm_names[name] = None if not counts else name if shard is None else f"{name}[{shard.index}]"
            if shard is not None:
                rank_shards[name] = shard
        return cls(rank_shards, reductions, norm_names)

    def lending(self, loans: Mapping[str, str]) -> Sharding:
        """Let copies (the keys of `loans`) use their original's values and have only a gradient."""
        lent = {name: replace(reduction, lent=name in loans) for name, reduction in self.reductions.items()}
        return replace(self, reductions=lent)

    def with_zero(self, ties: Mapping[str, str], grid: Grid, whole: Mapping[str, int] | None = None) -> Sharding:
        """The sharding of ZeRO-1: ranks that sum gradients with each other divide the optimizer's state and step.

        ties: full names, copy -> original. Each tied parameter has a bucket of its own, so that the ranks that hold its
        two copies step the same elements of both. whole: the number of elements of each parameter that only one rank
        can step.
        """
        tied = ties.keys() | set(ties.values())
        stepping_ranks = _stepping_ranks(whole or {}, self.reductions, ties)
        return Sharding(
            self.shards,
            {
                name: replace(
                    reduction,
                    sharded=reduction.group is not None,
                    owner=stepping_ranks.get(name),
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


def _is_first_with(shard: Shard | None, grid: Grid) -> bool:
    """True if this rank is the first of the tensor-parallel ranks that have the same part."""
    if grid.tp_rank == 0:
        return True
    return shard is not None and shard.axis == "tp" and shard != shard.on(grid.tp_rank - 1, grid.layout.tp)


def stepped_whole(
    parameters: Mapping[str, nn.Parameter], parameter_groups: ParameterGroups, shards: Mapping[str, Shard]
) -> dict[str, int]:
    """The parameters whose optimizer cannot step a part of them, each with its number of elements.

    Raises: ValueError if tensor- or expert-parallel ranks divide one of them, so that no rank has it whole.
    """
    sizes = {}
    for name, parameter in parameters.items():
        if parameter_groups.division(name, parameter) is not Division.ELEMENTS:
            if name in shards:
                rule = parameter_groups.rules[parameter_groups.number(name, parameter)]
                raise ValueError(
                    f"the optimizer {rule.made_as} steps whole parameters, but {shards[name].axis} ranks share "
                    f"{name}; set {shards[name].axis} = 1, or give it another optimizer"
                )
            sizes[name] = parameter.numel()
    return sizes


def _stepping_ranks(
    whole: Mapping[str, int], reductions: Mapping[str, Reduction], ties: Mapping[str, str]
) -> dict[str, int]:
    """The rank of its group that steps each of these parameters, as evenly as possible by elements.

    Ranks of one group get the same answer, and so do ranks of several that hold the two copies of a tied parameter.
    """
    tied, stepping_ranks = ties.keys() | set(ties.values()), {}
    loads: dict[int, list[int]] = {}
    for name in sorted(whole, key=lambda name: (-whole[name], name)):
        group = reductions[name].group
        if group is None:
            continue
        if name in tied:
            stepping_ranks[name] = crc32(ties.get(name, name).encode()) % group.size()
            continue
        load = loads.setdefault(id(group), [0] * group.size())
        stepping_ranks[name] = load.index(min(load))
        load[stepping_ranks[name]] += whole[name]
    return stepping_ranks
