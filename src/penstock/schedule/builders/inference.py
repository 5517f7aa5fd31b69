"""Forward only: scoring and evaluation."""

from __future__ import annotations

from penstock.schedule.actions import Placement, PlacementKind, Schedule
from penstock.schedule.builders.orders import forwards


def inference(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Forwards alone: a microbatch passes a stage a step.

    With one stage a rank, stage s has microbatch m at step m + s, and all ends after m + p - 1 steps. Nothing outlives
    its own forward, so that one tape a rank is live at a time.

    Raises: ValueError for counts below one.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    orders = tuple(tuple(forwards(placement, rank, microbatches)) for rank in range(ranks))
    return Schedule("inference", placement, microbatches, orders, live_bound=(1,) * ranks, training=False)
