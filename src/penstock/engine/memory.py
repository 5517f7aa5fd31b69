"""What parameters, gradients and the optimizer weigh on each rank of a layout, worked out without starting any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch.distributed import ProcessGroup

from penstock.engine.build import SECOND_COPY, Ties, cut_units
from penstock.engine.options import EngineOptions
from penstock.engine.sharing import Sharing, UnitSource, units_for
from penstock.engine.zero import shared_out
from penstock.model import ModelGroups, UnitSpec
from penstock.model.groups import PlannedPeers
from penstock.parallel import GradientBuckets, Grid, Layout
from penstock.parallel.buckets import StateBytes, state_bytes


def rank_state_bytes(source: UnitSource, layout: Layout, options: EngineOptions) -> list[StateBytes]:
    """Of each rank, in order, what it holds throughout training beside activations.

    The cut is that of the units' estimated work, or the options' own.

    Raises: ValueError when the model can not be shared or cut so.
    """
    known: dict[tuple[int, ...], StateBytes] = {}
    found = []
    for rank in range(layout.world_size):
        grid = planned_grid(layout, rank)
        key = (grid.pp_rank, grid.tp_rank, grid.ep_rank)
        if key not in known:
            known[key] = _of_rank(source, grid, options)
        found.append(known[key])
    return found


def planned_grid(layout: Layout, rank: int) -> Grid:
    """A rank's place in a layout, with groups that say their size and the place in them, and do not exist."""

    def group(groups: Sequence[tuple[int, ...]]) -> ProcessGroup | None:
        ranks = next(ranks for ranks in groups if rank in ranks)
        # Nothing is sent, so a size and a place will do.
        return None if len(ranks) == 1 else cast(ProcessGroup, PlannedPeers(len(ranks), ranks.index(rank)))

    return Grid(
        layout,
        torch.device("cpu"),
        rank,
        tp_group=group(layout.groups("tp")),
        cp_group=group(layout.groups("cp")),
        ep_group=group(layout.expert_groups()),
        dp_cp_group=group(layout.groups("dp", "cp")),
        edp_group=group(layout.expert_copies()),
    )


def held_bytes(
    parameters: Iterable[torch.nn.Parameter], gradients: Sequence[GradientBuckets], optimizer_bytes: int
) -> StateBytes:
    """What a rank that runs does hold: its tensors, flat ones of many parameters mostly, as they lie in memory."""
    buckets = [bucket for stage in gradients for bucket in stage.buckets]
    storages = {storage.data_ptr(): storage for storage in (p.untyped_storage() for p in parameters)}
    return StateBytes(
        sum(storage.nbytes() for storage in storages.values()),
        sum(bucket.gradients.untyped_storage().nbytes() for bucket in buckets),
        optimizer_bytes,
    )


def _of_rank(source: UnitSource, grid: Grid, options: EngineOptions) -> StateBytes:
    groups = ModelGroups(grid.tp_group, grid.cp_group, grid.ep_group, options.attention)
    units = units_for(source, groups, grid.layout)
    placement = options.choice.placement(grid.layout.pp)
    cut = cut_units(units, placement, options)
    stages = {number: cut[number % len(cut)] for number in placement.stages_of(grid.pp_rank)}
    parameters = {
        number: _parameters([units[i] for i in members], SECOND_COPY if number >= len(cut) else "", options)
        for number, members in stages.items()
    }
    names = [name for held in parameters.values() for name, _ in held]
    ties = Ties.of(units, names, placement.num_routes)
    sharing = Sharing.of(units, names, grid).lending(ties.loans(names))
    if options.optimizer.zero:
        sharing = shared_out(sharing, ties.owners, grid)
    parts = [state_bytes(held, grid.dp_cp_group, sharing.reductions) for held in parameters.values()]
    return sum(parts, StateBytes(0, 0, 0))


def _parameters(units: Sequence[UnitSpec], suffix: str, options: EngineOptions) -> list[tuple[str, torch.nn.Parameter]]:
    with torch.device("meta"):
        built = [(unit.name, unit.build().to(dtype=options.precision.parameter_dtype)) for unit in units]
    return [(f"{name}.{own}{suffix}", p) for name, module in built for own, p in module.named_parameters()]
