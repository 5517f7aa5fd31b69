"""Small changes to whole orders for the end of the whole step, within the bytes that stages really keep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.schedule.builders.search_anneal import Cooling, shorter
from penstock.schedule.builders.search_polish import MOVES, span_of
from penstock.schedule.builders.search_problem import TOLERANCE, Codes, Problem
from penstock.schedule.builders.search_skeletons import one_at_a_time


def shorten_step(problem: Problem, orders: Codes, kept: Sequence[float], num_steps: int) -> list[Codes]:
    """Orders whose last rank ends early, all ranks starting together; the best first.

    `kept` is what each stage keeps of a microbatch, in any unit. No rank keeps more at a time than
    `max_live_microbatches` whole ones of the rank that keeps the most; the orders to begin with may. The last of those
    given back is one microbatch at a time, which always fits.
    """
    alone = [_with_weights(steps) for steps in one_at_a_time(problem)]
    found = _shortened(problem, orders, kept, Cooling(num_steps, 0.05))
    if not found:
        # What does not come to fit from an order that keeps too much may do so from one that takes too long.
        found = _shortened(problem, alone, kept, Cooling(num_steps, 0.5))
    return [*found[:-4:-1], alone]


def _shortened(problem: Problem, orders: Codes, kept: Sequence[float], cooling: Cooling) -> list[Codes]:
    """Those that fit, each shorter than the one before, as actions are moved."""
    most = limit_of(problem, kept)
    # A little too much costs more than any order could gain by it.
    penalty = sum(problem.work) / most
    current = [list(order) for order in orders]

    def cost(moved: list[int]) -> float | None:
        end = span_of(problem, current, from_start=True)
        if end is None:
            return None
        excess = sum(max(0.0, peak_of(problem, order, kept) - most) for order in current)
        return end if excess <= TOLERANCE * most else end + penalty * excess + problem.mean_action

    found = [orders, *shorter(current, cost, MOVES, 0.0, cooling, problem.mean_action)]
    return [one for one in found if max(peak_of(problem, order, kept) for order in one) <= most * (1 + TOLERANCE)]


def limit_of(problem: Problem, kept: Sequence[float]) -> float:
    """What a rank may keep at a time."""
    return problem.max_live_microbatches * max(sum(kept[stage] for stage in own) for own in problem.stages_of)


def peak_of(problem: Problem, order: Sequence[int], kept: Sequence[float]) -> float:
    """The most that a rank keeps at a time with its order."""
    share = problem.weight_memory_share
    change = (1.0, share - 1.0, -share)
    return max(accumulate(kept[code // 3] * change[code % 3] for code in order))


def _with_weights(steps: Sequence[int]) -> list[int]:
    """A skeleton's order with each W behind its I."""
    order = []
    for step in steps:
        code = 3 * (step >> 1)
        order += [code + 1, code + 2] if step & 1 else [code]
    return order
