"""The order that a search finds for given times within a given memory."""

from penstock.schedule.actions import Schedule
from penstock.schedule.builders.registry import builder
from penstock.schedule.placement import Placement, PlacementKind, check_count
from penstock.schedule.search.order import SearchOptions, shortest


@builder("auto", options=SearchOptions)
def auto(ranks: int, microbatches: int, stages_per_rank: int = 1, *, options: SearchOptions) -> Schedule:
    """Searched: the shortest order found for given times within a limit of live microbatches.

    The shortest order has the least span: the longest time over ranks from a rank's own first start to its own end,
    since the optimizer step of a rank waits for no other. No rank has more than `max_live_microbatches` at any time.
    That is the paper's M_limit in units of M_B, with M_W / M_B as `weight_memory_share`; read so, the paper's own
    heuristic gives the two search columns of its table of theoretical bubble rates.

    Raises: ValueError for counts below one, other placements, a limit below 1, a share outside 0 to 1, and times that
    are negative or not one for each stage.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241): cost and memory limit sections 3.1 and 3.2.
    """
    check_count("ranks", ranks)
    if isinstance(options.placement, tuple):
        placement = Placement(PlacementKind.MAP, ranks, homes=options.placement)
        if stages_per_rank not in (1, placement.stages_per_rank):
            raise ValueError(
                f"placement = {list(options.placement)} says how many stages a rank has; leave stages_per_rank out"
            )
    else:
        placement = Placement(PlacementKind(options.placement or "loop"), ranks, stages_per_rank)
    return shortest(placement, microbatches, options)
