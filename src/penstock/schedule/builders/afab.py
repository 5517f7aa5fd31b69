"""All forwards, then all backwards."""

from __future__ import annotations

from penstock.schedule.actions import Placement, PlacementKind, Schedule
from penstock.schedule.builders.orders import backwards, forwards
from penstock.schedule.builders.registry import builder


@builder("afab")
def afab(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards: the simplest order, and the most memory.

    The backwards take the microbatches in the forwards' order, not the reverse, so that every schedule of this package
    adds gradients in the same order. All microbatches are live at the peak; the bubble is (p-1)/(m+p-1).

    Raises: ValueError for counts below one.

    Source: Huang et al., GPipe (arXiv 1811.06965), section 2.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    orders = tuple(
        tuple(forwards(placement, rank, microbatches) + backwards(placement, rank, microbatches))
        for rank in range(ranks)
    )
    return Schedule("afab", placement, microbatches, orders, live_bound=(microbatches * stages_per_rank,) * ranks)
