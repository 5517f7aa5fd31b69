"""1F1B with each forward fused with a backward, so that one computes while the other communicates."""

from __future__ import annotations

from penstock.schedule.actions import Placement, PlacementKind, Schedule
from penstock.schedule.builders.interleaved import groups, warm_up
from penstock.schedule.builders.orders import backwards, forwards, fuse_turns, peak_tapes, renumber, split_backwards
from penstock.schedule.builders.registry import builder


@builder("combined-1f1b")
def combined_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 1, split_backward: bool = False) -> Schedule:
    """1F1B in fused pairs, which hide expert and tensor communication, for twice its memory.

    A pair is one step for its neighbours, so the way to the last rank and back takes twice as many steps as in 1F1B.
    Stage s starts with 2(p-s-1) + 1 forwards; the last of them makes the two actions of every pair independent. At most
    2(p-s) microbatches are live. On one rank the order is F0, (F1, B0), (F2, B1) and so on, then the last B alone.

    With `split_backward` every backward is an I in its pair with a W right after the pair, so that a rank sends its
    input gradient before it computes its weight gradients.

    Raises: ValueError for counts below one, or more than one stage a rank (see combined-interleaved).

    Source: Megatron Core, combined 1F1B (arXiv 2603.07685); its lead without local stages follows from the above.
    """
    if stages_per_rank != 1:
        raise ValueError(f"combined-1f1b has one stage on each rank: stages_per_rank must be 1, got {stages_per_rank}")
    return _combined("combined-1f1b", ranks, microbatches, stages_per_rank, None, split_backward)


@builder("combined-interleaved")
def combined_interleaved(
    ranks: int, microbatches: int, stages_per_rank: int = 2, group_size: int | None = None, split_backward: bool = False
) -> Schedule:
    """The interleaved order in fused pairs, which hide expert and tensor communication, for one more tape.

    The order is that of `interleaved` with one more forward ahead of the first pair; without it the last rank would
    pair a forward with the backward that needs it. `split_backward` is that of `combined_1f1b`.

    Raises: ValueError for counts below one.

    Source: Megatron Core, combined 1F1B with interleaved stages (arXiv 2603.07685).
    """
    return _combined("combined-interleaved", ranks, microbatches, stages_per_rank, group_size, split_backward)


def _combined(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, group_size: int | None, split_backward: bool
) -> Schedule:
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    size, places = groups(ranks, microbatches, group_size)
    orders = []
    for rank in range(ranks):
        passes = (pass_over(placement, rank, len(places), size) for pass_over in (forwards, backwards))
        order = fuse_turns(*passes, warm_up=warm_up(placement, rank, size) + 1)
        orders.append(renumber(split_backwards(order) if split_backward else order, places))
    return Schedule(name, placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))
