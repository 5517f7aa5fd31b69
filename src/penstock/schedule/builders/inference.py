"""Forward only: scoring and evaluation."""

from __future__ import annotations

from penstock.schedule.actions import Placement, PlacementKind, Schedule
from penstock.schedule.builders.orders import forwards
from penstock.schedule.builders.registry import builder


@builder("inference")
def inference(ranks: int, microbatches: int, stages_per_rank: int = 1, placement: str = "loop") -> Schedule:
    """Forwards alone: a microbatch passes a stage a step.

    With one stage a rank, stage s has microbatch m at step m + s, and all ends after m + p - 1 steps. A tape ends with
    its forward, so one tape a rank is live at a time. `placement` is loop, v or bidirectional, to run on the stages of
    a schedule that trains.

    Raises: ValueError for counts below one, or an unknown placement.
    """
    kinds = [kind.value for kind in PlacementKind]
    if placement not in kinds:
        raise ValueError(f"placement must be one of {', '.join(kinds)}, got {placement!r}")
    where = Placement(PlacementKind(placement), ranks, stages_per_rank)
    empty = Schedule("inference", where, microbatches, ((),) * ranks, training=False)
    orders = tuple(
        tuple(a for a in forwards(where, rank, microbatches) if a.microbatch in empty.microbatches_of(a.stage))
        for rank in range(ranks)
    )
    return Schedule("inference", where, microbatches, orders, live_bound=(1,) * ranks, training=False)
