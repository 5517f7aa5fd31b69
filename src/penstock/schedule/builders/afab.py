"""Orders in which a stage's forwards all come before its backwards, or stand alone."""

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


@builder("looped-bfs")
def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """All microbatches through one local stage after another: each stage's work in one piece, and the most memory.

    A stage's backwards follow each other, so its gradients are reduced, and its sharded weights gathered, once and
    early, while the other stages compute. All microbatches are live at the peak; if m is a multiple of p, the bubble is
    (p-1)/(vm+p-1). The backwards take the microbatches in the forwards' order, as in every builder.

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


@builder("inference", trains=False)
def inference(ranks: int, microbatches: int, stages_per_rank: int = 1, placement: str = "loop") -> Schedule:
    """Forwards alone: a microbatch passes a stage a step.

    With one stage a rank, stage s runs microbatch m at step m + s, and m microbatches take m + p - 1 steps. A tape ends
    with its forward, so each rank has one live tape at a time. `placement` is loop, v or bidirectional, to run on the
    stages of a schedule that trains.

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
