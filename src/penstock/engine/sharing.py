"""What the engine must know of parameters that are not alike on all ranks: parts, sums, and who counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.engine.build import SECOND_COPY
from penstock.model import ModelGroups, Shard, UnitSpec
from penstock.parallel import Grid, Layout, Reduction

UnitSource = Sequence[UnitSpec] | Callable[[ModelGroups], Sequence[UnitSpec]]
"""A model's units, or what makes them for the groups that share them."""


def units_for(source: UnitSource, groups: ModelGroups, layout: Layout) -> tuple[UnitSpec, ...]:
    """The units, made for these groups.

    Raises:
        ValueError: they are there already, and the layout wants them shared.
    """
    if callable(source):
        return tuple(source(groups))
    if (layout.tp, layout.cp, layout.ep) != (1, 1, 1):
        raise ValueError(
            f"the layout {layout} shares a model over tp, cp or ep, but its units are given ready-made; "
            "give a function that makes them from ModelGroups, or a layout of pp and dp alone"
        )
    return tuple(source)


@dataclass(frozen=True)
class Sharing:
    """By full name, of this rank's parameters.

    shards: which part this rank holds, of those that are shared. reductions: over which ranks gradients are summed.
    pieces: under which name this rank counts the parameter in the norm of the whole model; None where another does.
    """

    shards: Mapping[str, Shard]
    reductions: Mapping[str, Reduction]
    pieces: Mapping[str, str | None]

    @classmethod
    def of(cls, units: Sequence[UnitSpec], parameters: Iterable[str], grid: Grid) -> Sharing:
        """The sharing of this rank's parameters, given by full name."""
        shards = {unit.full_name(own): shard for unit in units for own, shard in unit.sharding.items()}
        partial = {unit.full_name(own) for unit in units for own in unit.partial}
        # Both copies of a model that is held twice are shared alike.
        plain = {name: name.removesuffix(SECOND_COPY) for name in parameters}
        return cls(
            {name: shards[of] for name, of in plain.items() if of in shards},
            {name: _reduction(shards.get(of), of in partial, grid) for name, of in plain.items()},
            {name: _piece(name, shards.get(of), grid) for name, of in plain.items()},
        )

    def lending(self, loans: Mapping[str, str]) -> Sharing:
        """The same, where copies (the keys of `loans`) use another parameter's values and have a gradient alone."""
        lent = {name: replace(reduction, lent=name in loans) for name, reduction in self.reductions.items()}
        return replace(self, reductions=lent)


def _reduction(shard: Shard | None, partial: bool, grid: Grid) -> Reduction:
    over_experts = shard is not None and shard.axis == "ep"
    group = grid.edp_group if over_experts else grid.dp_cp_group
    if not partial:
        return Reduction(group)
    if shard is None or over_experts:
        return Reduction(group, grid.tp_group)
    return Reduction(group, grid.tp_group, shard.index, shard.count)


def _piece(name: str, shard: Shard | None, grid: Grid) -> str | None:
    """Of ranks that hold the same, the first counts it."""
    tp, ep, tp_size = grid.tp_rank, grid.ep_rank, grid.layout.tp
    if shard is None:
        return name if (tp, ep) == (0, 0) else None
    if shard.axis == "ep":
        return f"{name}[{shard.index}]" if tp == 0 else None
    first = tp == 0 or shard.index != shard.count * (tp - 1) // tp_size
    return f"{name}[{shard.index}]" if first and ep == 0 else None
