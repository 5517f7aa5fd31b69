"""The backward split in two, so that the part no other rank waits for fills the bubbles."""

from penstock.schedule.actions import Op, Schedule, peak_tapes
from penstock.schedule.builders.orders import (
    backwards,
    check_stages_per_rank,
    forwards,
    groups,
    num_ahead,
    renumber,
    take_turns_split,
)
from penstock.schedule.builders.registry import builder
from penstock.schedule.placement import Placement, PlacementKind


@builder("zb-h1")
def zb_h1(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1F1B with W apart from I: a third of the bubble at 1F1B's memory.

    Stage s starts with p-s-1 forwards and lets its W fall behind its I by s, so that every stage has p microbatches
    live, as the first has in 1F1B.

    Raises: ValueError for counts below one or more than one stage a rank.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.1, ZB-H1.
    """
    return _handcrafted("zb-h1", ranks, microbatches, stages_per_rank, lead=1)


@builder("zb-h2")
def zb_h2(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """ZB-H1 with twice the forwards ahead: next to no bubble at twice 1F1B's memory.

    Stage s starts with 2(p-s-1) forwards and lets its W fall behind its I by 2s: 2p-1 microbatches are live.

    Raises: ValueError for counts below one or more than one stage a rank.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.2, ZB-H2.
    """
    return _handcrafted("zb-h2", ranks, microbatches, stages_per_rank, lead=2)


def _handcrafted(name: str, ranks: int, microbatches: int, stages_per_rank: int, *, lead: int) -> Schedule:
    check_stages_per_rank(name, stages_per_rank, 1)
    placement = Placement(PlacementKind.LOOP, ranks)
    orders = tuple(
        tuple(
            take_turns_split(
                forwards(placement, stage, microbatches),
                backwards(placement, stage, microbatches, op=Op.I),
                lead * (ranks - stage - 1),
                lead * stage,
            )
        )
        for stage in range(ranks)
    )
    return Schedule(name, placement, microbatches, orders, (min(lead * (ranks - 1) + 1, microbatches),) * ranks)


@builder("interleaved-zb")
def interleaved_zb(ranks: int, microbatches: int, stages_per_rank: int = 2, group_size: int | None = None) -> Schedule:
    """The interleaved order with W apart from I: less bubble at the memory that its first rank needs anyway.

    Forwards and `I` stand as in `interleaved`, with the same `group_size`. Rank s has 2s fewer forwards ahead than the
    first rank, and lets its W fall behind its I by as many.

    Raises: ValueError for counts below one.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.1, on the order of Narayanan et
    al. (arXiv 2104.04473), section 2.2.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    size, places = groups(ranks, microbatches, group_size)
    orders = []
    for rank in range(ranks):
        order = take_turns_split(
            forwards(placement, rank, len(places), size),
            backwards(placement, rank, len(places), size, op=Op.I),
            num_ahead(placement, rank, size),
            2 * rank,
        )
        orders.append(renumber(order, places))
    return Schedule("interleaved-zb", placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))
