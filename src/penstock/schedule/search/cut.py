"""The search for a cut of a model's units together with the order of its actions, for the shortest step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nsmallest
from itertools import pairwise
from math import isclose

from penstock.schedule.actions import Placement
from penstock.schedule.costs import Costs
from penstock.schedule.lower import lower
from penstock.schedule.partition import balanced_cut, partition, ranges
from penstock.schedule.search.order import SearchOptions, shortest
from penstock.schedule.simulate import simulate

_TIMES = ("forward", "backward_input", "backward_weight")
_NUM_LOOKED_AT = 300
# Each round's number of cuts, and its share of the effort; a round takes the best cuts of the round before.
_TRIALS = ((24, 0.1), (8, 0.3), (2, 1.0))

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchedCut:
    """A cut, with the result of the search for its order.

    >>> SearchedCut((range(0, 3), range(3, 5)), max_live_microbatches=2.0, makespan=12.5).cut[1]
    range(3, 5)
    """

    #: The units of each stage.
    cut: tuple[range, ...]
    #: The option of `auto` with which the order was found.
    max_live_microbatches: float
    #: The time of a whole step.
    makespan: float


def search_cut(
    units: Costs,
    placement: Placement,
    microbatches: int,
    max_live_microbatches: float | None = None,
    effort: float = 1.0,
) -> SearchedCut:
    """Find the cut into a placement's stages whose order by `auto`, with `whole_step`, ends first.

    The search tries cuts with even ranks, those with the most even ranks and stages first: a short first stage lets
    later ranks begin earlier, and three stages a rank can be more even than two. `units` has times and
    `microbatch_bytes` for each unit of the model. A rank keeps at most as much at a time as 1F1B would with its own
    cut; `max_live_microbatches` scales that limit by `max_live_microbatches` / number of ranks.

    The search can take a minute; it logs each round.

    >>> from penstock.schedule import PlacementKind
    >>> units = Costs(*[[1.0, 2.0, 2.0, 1.0]] * 3, microbatch_bytes=[1.0] * 4)
    >>> search_cut(units, Placement(PlacementKind.LOOP, num_ranks=2), microbatches=2, effort=0.01).cut
    (range(0, 2), range(2, 4))

    Raises: ValueError for more stages than units, for costs without one number for each unit, and for impossible times
    or limits.
    """
    names = (*_TIMES, "microbatch_bytes")
    lengths = {len(value) if isinstance(value := getattr(units, name), Sequence) else None for name in names}
    if None in lengths or len(lengths) > 1:
        raise ValueError(f"{', '.join(names)} must have one number for each unit of the model")
    num_ranks = placement.num_ranks
    most = _heaviest(units, partition(units.totals, num_ranks), Placement(placement.kind, num_ranks, 1))
    most *= num_ranks if max_live_microbatches is None else max_live_microbatches

    def tried(cut: tuple[range, ...], effort: float) -> SearchedCut | None:
        # If ranks keep nothing of a microbatch, any number may be live.
        whole = _heaviest(units, cut, placement)
        limit = most / whole if whole else float(microbatches)
        if limit < 1 and not isclose(limit, 1):
            return None
        costs, limit = costs_of_cut(units, cut), max(1.0, limit)
        options = SearchOptions(max_live_microbatches=limit, effort=effort, **options_for_step(costs))  # type: ignore[arg-type]
        made = shortest(placement, microbatches, options)
        return SearchedCut(cut, limit, simulate(lower(made), costs).makespan)

    cuts = list(even_cuts(units.totals, placement, _TRIALS[0][0]))
    found = list[SearchedCut]()
    for turn, (number, part) in enumerate(_TRIALS, start=1):
        cuts = cuts[:number]
        _logger.info("searching for a cut: round %d of %d, %d cuts", turn, len(_TRIALS), len(cuts))
        found = [one for cut in cuts if (one := tried(cut, part * effort)) is not None]
        found.sort(key=lambda one: one.makespan)
        cuts = [one.cut for one in found]
    if not found:
        raise ValueError(f"no cut keeps to {max_live_microbatches:g} live microbatches; {num_ranks} are possible")
    return found[0]


def options_for_step(costs: Costs) -> dict[str, object]:
    """Give the options of `auto` for the shortest whole step with these costs of stages.

    >>> options_for_step(Costs(forward=[1.0, 2.0]))["forward"]
    (1.0, 2.0)
    """
    share = costs.weight_memory_share
    return {
        "forward": costs.forward,
        "backward_input": costs.backward_input,
        "backward_weight": costs.backward_weight,
        "transfer": costs.arrival,
        "microbatch_bytes": costs.microbatch_bytes,
        # One number serves all stages: that of the stage that keeps the most.
        "weight_memory_share": min(1.0, max(share)) if isinstance(share, Sequence) else share,
        "whole_step": True,
    }


def costs_of_cut(units: Costs, cut: Sequence[range]) -> Costs:
    """Add up the costs of units to those of a cut's stages.

    >>> costs_of_cut(Costs([1, 2, 3], [1, 1, 1], [2, 2, 2]), [range(0, 2), range(2, 3)]).forward
    (3, 3)
    """

    def of_stages(values: object) -> tuple[float, ...]:
        assert isinstance(values, Sequence)
        return tuple(sum(values[i] for i in members) for members in cut)

    sizes = (name for name in ("recompute", "microbatch_bytes") if isinstance(getattr(units, name), Sequence))
    names = (*_TIMES, *sizes)
    return replace(units, **{name: of_stages(getattr(units, name)) for name in names})  # type: ignore[arg-type]


def even_cuts(times: Sequence[float], placement: Placement, number: int) -> Iterator[tuple[range, ...]]:
    """Yield cuts whose slowest rank is barely slower than it must be, the most even first.

    They are found from the most even cut by moving one border at a time.
    """
    mean = sum(times) / placement.num_ranks

    def key(borders: tuple[int, ...]) -> tuple[int, float, tuple[int, ...]]:
        stages = [sum(times[start:stop]) for start, stop in pairwise(borders)]
        slowest = max(sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))
        # Times cannot be measured to half a percent.
        return round(200 * slowest / mean) if mean else 0, sum(time * time for time in stages), borders

    start = tuple(members.start for members in balanced_cut(times, placement)) + (len(times),)
    seen, open_ones, closed = {start}, [key(start)], []
    while open_ones and len(closed) < _NUM_LOOKED_AT:
        closed.append(heappop(open_ones))
        borders = closed[-1][-1]
        for place in range(1, len(borders) - 1):
            for step in (-2, -1, 1, 2):
                moved = (*borders[:place], borders[place] + step, *borders[place + 1 :])
                if moved[place - 1] < moved[place] < moved[place + 1] and moved not in seen:
                    seen.add(moved)
                    heappush(open_ones, key(moved))
    for *_, borders in nsmallest(number, closed + open_ones):
        yield ranges(borders)


def _heaviest(units: Costs, cut: Sequence[range], placement: Placement) -> float:
    """The bytes of a microbatch on the rank that keeps the most of it."""
    kept = units.microbatch_bytes
    assert isinstance(kept, Sequence)
    of_stages = [sum(kept[i] for i in members) for members in cut]
    return max(sum(of_stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))
