"""Forward only: scoring and evaluation."""

from __future__ import annotations

from penstock.schedule.actions import Action, Op, Placement, PlacementKind, Schedule


def inference(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Forwards alone: a microbatch passes a stage a step.

    With one stage a rank, stage s has microbatch m at step m + s, and all ends after m + p - 1 steps. Nothing outlives
    its own forward, so that one tape a rank is live at a time.

    Raises: ValueError for counts below one.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    orders = tuple(tuple(forwards(placement, rank, microbatches)) for rank in range(ranks))
    return Schedule("inference", placement, microbatches, orders, live_bound=(1,) * ranks, training=False)


def forwards(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """A rank's forwards: in groups of p microbatches, each group through the rank's stages one after the other.

    While the last microbatch of a group is still under way to the last rank, the first is back at the first rank, ready
    for its next stage: no rank waits between groups.
    """
    actions = []
    for start in range(0, num_microbatches, placement.num_ranks):
        group = range(start, min(start + placement.num_ranks, num_microbatches))
        for stage in placement.stages_of(rank):
            actions += [Action(Op.F, stage, microbatch) for microbatch in group]
    return actions
