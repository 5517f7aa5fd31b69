"""Two stages a rank in a V: the first rank has both ends of the model, and less memory costs more bubble."""

from itertools import product

from penstock.schedule.actions import Schedule, peak_tapes
from penstock.schedule.builders.orders import check_stages_per_rank
from penstock.schedule.builders.registry import builder
from penstock.schedule.builders.squeeze import PREFERENCES, Order, pattern, squeeze
from penstock.schedule.placement import Placement, PlacementKind
from penstock.schedule.search.skeletons import without_bubble

# The turns of the patterns that are tried, in slots; the best depends on p modulo 2 and 3.
_GAPS = ((1, 1, 1), (1, 3, 1), (1, 5, 1), (1, 1, 2), (1, 4, 2))


@builder("zb-v")
def zb_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Zero bubble in a V: no bubble at all where F, I and W take equal times, at 1F1B's memory.

    With 2p-1 or more microbatches no rank waits between its first action and its last; at most 2p tapes are live.

    Raises: ValueError for counts below one, or other than two stages a rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), V-ZB; Zero Bubble Pipeline
    Parallelism (arXiv 2401.10241), section 6, ZB-V.
    """
    placement = _placement("zb-v", ranks, stages_per_rank)
    if microbatches >= 2 * ranks - 1:
        orders = tuple(without_bubble(placement, rank, microbatches) for rank in range(ranks))
        return _schedule("zb-v", placement, microbatches, orders)
    orders = [without_bubble(placement, rank, 2 * ranks - 1, microbatches) for rank in range(ranks)]
    # No other preference has ever given a shorter one.
    short = squeeze(placement, orders, PREFERENCES[0], max_tapes=2 * ranks)
    assert short is not None, f"zb-v does not end with {microbatches} microbatches"
    return _schedule("zb-v", placement, microbatches, short.orders)


@builder("v-half")
def v_half(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """A V whose memory tends to half of 1F1B's for many ranks, with less than its bubble.

    At most floor(p/2) + 1 microbatches are live, counted as full ranks of activations (twice as many tapes). The bubble
    does not grow with the number of microbatches where F, I and W take equal times.

    Raises: ValueError for counts below one, or other than two stages a rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), V-Half.
    """
    placement = _placement("v-half", ranks, stages_per_rank)
    return _squeezed("v-half", placement, microbatches, 2 * (ranks // 2 + 1), step=2)


@builder("v-min")
def v_min(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """A V whose memory tends to a third of 1F1B's for many ranks, the least that keeps every rank busy.

    At most floor((p+1)/3) + 1 microbatches are live, counted as full ranks of activations (twice as many tapes).

    Raises: ValueError for counts below one, or other than two stages a rank.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), V-Min.
    """
    placement = _placement("v-min", ranks, stages_per_rank)
    return _squeezed("v-min", placement, microbatches, 2 * ((ranks + 1) // 3 + 1), step=1)


def _placement(name: str, ranks: int, stages_per_rank: int) -> Placement:
    check_stages_per_rank(name, stages_per_rank, 2)
    return Placement(PlacementKind.V, ranks, stages_per_rank)


def _schedule(name: str, placement: Placement, num_microbatches: int, orders: tuple[Order, ...]) -> Schedule:
    return Schedule(name, placement, num_microbatches, orders, tuple(map(peak_tapes, orders)))


def _squeezed(name: str, placement: Placement, num_microbatches: int, max_tapes: int, step: int) -> Schedule:
    """The shortest schedule of any of the patterns, squeezed under any of the preferences.

    They are compared with at most three times p microbatches; beyond that only the steady middle grows.
    """
    num_compared = min(num_microbatches, 3 * placement.num_ranks)
    patterns = {gaps: pattern(placement, num_compared, step, gaps) for gaps in _GAPS}
    results = [
        ((tried.span, tried.makespan), tried, gaps, preference)
        for (gaps, orders), preference in product(patterns.items(), PREFERENCES)
        if orders is not None and (tried := squeeze(placement, orders, preference, max_tapes)) is not None
    ]
    _, best, gaps, preference = min(results, key=lambda result: result[0])
    if num_compared < num_microbatches:
        orders = pattern(placement, num_microbatches, step, gaps)
        assert orders is not None
        best = squeeze(placement, orders, preference, max_tapes)
    assert best is not None, f"{name} ends with {num_compared} microbatches, but not with {num_microbatches}"
    return _schedule(name, placement, num_microbatches, best.orders)
