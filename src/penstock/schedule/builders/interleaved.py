"""One forward, one backward, over several local stages."""

from __future__ import annotations

from penstock.schedule.actions import Placement, PlacementKind, Schedule
from penstock.schedule.builders.orders import backwards, forwards, peak_tapes, renumber, take_turns
from penstock.schedule.builders.registry import builder
from penstock.settings import ScheduleConfig


@builder("interleaved")
def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2, group_size: int | None = None) -> Schedule:
    """One forward, one backward over several local stages: 1F1B's bubble cut by their number, for more memory.

    A rank takes n = `group_size` microbatches (None: p) through its first stage, the same through its second, and on;
    its backwards take the same groups through its stages in reverse. Rank s starts with 2(p-s-1) + (v-1)n forwards,
    or all of them. If m is a multiple of n = p, the bubble is (p-1)/(vm+p-1).

    Any m and n are possible, but ranks wait if a group has fewer than p microbatches.

    Raises: ValueError for counts below one.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv
    2104.04473), section 2.2.
    """
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    size, places = groups(ranks, microbatches, group_size)
    orders = []
    for rank in range(ranks):
        passes = (pass_over(placement, rank, len(places), size) for pass_over in (forwards, backwards))
        orders.append(renumber(take_turns(*passes, warm_up=warm_up(placement, rank, size)), places))
    return Schedule("interleaved", placement, microbatches, tuple(orders), tuple(map(peak_tapes, orders)))


def warm_up(placement: Placement, rank: int, group_size: int) -> int:
    """The number of forwards that a rank runs before its first backward's turn."""
    return 2 * (placement.num_ranks - rank - 1) + (placement.stages_per_rank - 1) * group_size


def groups(num_ranks: int, num_microbatches: int, group_size: int | None) -> tuple[int, list[int | None]]:
    """The number of places in a group, and the microbatch at each place of all groups; None for an empty place.

    If one of several groups had fewer than p places, two ranks could end up waiting for each other. So every group gets
    at least p places; the order is made for all places and then loses the empty ones.

    Raises: ConfigError for a size below one.
    """
    group_size = ScheduleConfig(group_size=group_size).group_size or num_ranks
    size = max(group_size, num_ranks)
    if num_microbatches <= group_size:
        return size, list(range(num_microbatches))
    places: list[int | None] = []
    for start in range(0, num_microbatches, group_size):
        group = range(start, min(start + group_size, num_microbatches))
        places += [*group, *[None] * (num_ranks - len(group))]
    return size, places
