"""One forward, one backward."""

from __future__ import annotations

from penstock.schedule.actions import Action, Op, Placement, PlacementKind, Schedule
from penstock.schedule.builders.registry import builder


@builder("1f1b")
def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One forward, one backward in turn: AFAB's bubble at the memory of p microbatches.

    Stage s starts with min(p-s-1, m) forwards (its warm-up). From then on each forward is followed by the oldest
    backward; the remaining backwards come last. At most min(p-s, m) microbatches are live on the stage; the bubble is
    (p-1)/(m+p-1).

    Raises: ValueError for counts below one or more than one stage a rank.

    Source: Narayanan et al., PipeDream-Flush (arXiv 2006.09503), section 3.2, and Megatron-LM (arXiv 2104.04473), 2.2.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    if stages_per_rank != 1:
        raise ValueError(f"1f1b has one stage on each rank: stages_per_rank must be 1, got {stages_per_rank}")
    orders = tuple(_order(ranks, stage, microbatches) for stage in range(ranks))
    live_bound = tuple(min(ranks - stage, microbatches) for stage in range(ranks))
    return Schedule("1f1b", placement, microbatches, orders, live_bound)


def _order(num_ranks: int, stage: int, num_microbatches: int) -> tuple[Action, ...]:
    warm_up = min(num_ranks - stage - 1, num_microbatches)
    forwards = [Action(Op.F, stage, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(Op.B, stage, microbatch) for microbatch in range(num_microbatches)]

    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        order += [forward, backward]
    return tuple(order + backwards[num_microbatches - warm_up :])
