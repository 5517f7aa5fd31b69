"""ZeRO-1: ranks that hold the same parameters share out the optimizer's state, and with it the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.engine.sharing import Sharing
from penstock.model import Shard
from penstock.parallel import Grid


def shared_out(sharing: Sharing, ties: Mapping[str, str], grid: Grid) -> Sharing:
    """The same sharing of parameters, with the step shared out among the ranks over which gradients are summed.

    ties: full names, copy -> owner. A tied parameter has a bucket of its own, so that the ranks that hold its two
    copies own the same elements of both.
    """
    tied = ties.keys() | set(ties.values())
    return Sharing(
        sharing.shards,
        {
            name: replace(reduction, sharded=reduction.group is not None, alone=name if name in tied else "")
            for name, reduction in sharing.reductions.items()
        },
        # No two of these ranks step the same elements, so each counts what it steps, under a name of its own.
        {
            name: f"{name}@{grid.rank}" if _is_first(sharing.shards.get(name), grid) else None
            for name in sharing.reductions
        },
    )


def _is_first(shard: Shard | None, grid: Grid) -> bool:
    """Whether this rank is the first of the tensor-parallel ranks that hold the same part."""
    if grid.tp_rank == 0:
        return True
    return (
        shard is not None and shard.axis == "tp" and shard.index != shard.count * (grid.tp_rank - 1) // grid.layout.tp
    )
