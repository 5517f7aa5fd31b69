"""Breadth first over several local stages."""

from __future__ import annotations

from penstock.schedule.actions import Placement, PlacementKind, Schedule
from penstock.schedule.builders.orders import backwards, forwards
from penstock.schedule.builders.registry import builder


@builder("looped-bfs")
def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """All microbatches through one local stage after another: each stage's work in one piece, and the most memory.

    All of a stage's backwards stand side by side, so its gradients are reduced, and its sharded weights gathered, once
    and early, while the other stages compute. All microbatches are live at the peak; if m is a multiple of p, the
    bubble is (p-1)/(vm+p-1). The backwards take the microbatches in the forwards' order, as in every builder.

    Raises: ValueError for counts below one.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv 2211.05953).
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    orders = tuple(
        tuple(
            forwards(placement, rank, microbatches, group_size=microbatches)
            + backwards(placement, rank, microbatches, group_size=microbatches)
        )
        for rank in range(ranks)
    )
    return Schedule("looped-bfs", placement, microbatches, orders, live_bound=(microbatches * stages_per_rank,) * ranks)
