"""Which stage holds which units, and in which order they work, where the units' times are known."""

from collections.abc import Sequence
from dataclasses import replace

from penstock import schedule
from penstock.engine.activations import kept_bytes
from penstock.engine.build import cut_units
from penstock.engine.options import EngineOptions
from penstock.engine.schedules import ScheduleChoice
from penstock.engine.unit_times import UnitTimes, stage_costs, unit_costs
from penstock.model import UnitSpec
from penstock.schedule import Costs, Placement

_MICROBATCHES_A_RANK = 4
"""For how many a cut is searched: later steps may have any number, and each its own order."""


def timed_cut(
    units: Sequence[UnitSpec], hidden_size: int, placement: Placement, options: EngineOptions, times: list[UnitTimes]
) -> tuple[tuple[range, ...], ScheduleChoice]:
    """The units of every stage of a placement, and the schedule for the times that they take.

    The same on every rank that has the same times.

    Raises:
        ValueError: more stages than units, or a cut by hand that leaves units out.
    """
    choice = options.choice
    if not choice.search_cut or options.cut is not None:
        cut = cut_units(units, placement, options, [own.total_s for own in times])
        return cut, choice.timed(stage_costs(times, cut))
    costs = with_kept_bytes(unit_costs(times), units, hidden_size, options)
    num_microbatches = _MICROBATCHES_A_RANK * placement.num_ranks
    found = schedule.search_cut(costs, placement, num_microbatches, choice.max_live_microbatches)
    timed = choice.timed(schedule.costs_of_cut(costs, found.cut))
    return found.cut, replace(timed, max_live_microbatches=found.max_live_microbatches)


def with_kept_bytes(costs: Costs, units: Sequence[UnitSpec], hidden_size: int, options: EngineOptions) -> Costs:
    """The units' costs with what each keeps of a microbatch, and of that for W what the model as a whole does."""
    alone = [range(i, i + 1) for i in range(len(units))]
    kept = kept_bytes(units, hidden_size, alone, options, options.measure_lengths or ())
    whole, for_weights = sum(own.whole for own in kept), sum(own.for_weights for own in kept)
    return replace(
        costs,
        microbatch_bytes=[own.whole for own in kept],
        weight_memory_share=min(1.0, for_weights / whole) if whole else 1.0,
    )
