"""Small changes to whole orders, W included: where a rank does well to run a W although nothing makes it wait."""

from __future__ import annotations

from penstock.schedule.builders.search_anneal import Cooling, shorter
from penstock.schedule.builders.search_problem import TOLERANCE, Codes, Problem

# By how many places an action is moved in its rank's order.
MOVES = (1, -1, 1, -1, 2, -2, 3, -3, 5, -5)


def polish(problem: Problem, orders: Codes, least: float, cooling: Cooling) -> Codes:
    """The shortest orders that come of moving one action of one rank at a time, by simulated annealing.

    Nothing is tried once the span is `least`. The same call has the same result.
    """
    current = [list(order) for order in orders]
    assert span_of(problem, current) is not None, "orders that can be carried out have a span"

    def span(moved: list[int]) -> float | None:
        return span_of(problem, current) if _fits(problem, moved) else None

    return [orders, *shorter(current, span, MOVES, least, cooling, problem.mean_action)][-1]


def _fits(problem: Problem, order: list[int]) -> bool:
    """Whether a rank's order keeps to the memory."""
    share, live = problem.weight_memory_share, 0.0
    change = (1.0, share - 1.0, -share)
    for code in order:
        live += change[code % 3]
        if live > problem.max_tapes + TOLERANCE:
            return False
    return True


def span_of(problem: Problem, orders: Codes, from_start: bool = False) -> float | None:
    """The longest time over ranks from a rank's own first start to its own end; None if the ranks cannot end.

    With `from_start` the time until all ranks have ended, which started together.
    """
    durations = (problem.forward, problem.backward_input, problem.backward_weight)
    arrivals: list[list[float]] = [[] for _ in range(2 * problem.num_stages)]
    arrivals[0] = [0.0] * problem.num_microbatches
    done = [0] * (3 * problem.num_stages)
    place, now = [0] * problem.num_ranks, [0.0] * problem.num_ranks
    first: list[float | None] = [None] * problem.num_ranks
    ready = list(range(problem.num_ranks))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while place[rank] < len(order):
            code = order[place[rank]]
            stage, op = divmod(code, 3)
            number = done[code]
            if op == 2:
                if number == done[code - 1]:
                    return None
                start = now[rank]
            else:
                known = arrivals[2 * stage + op]
                if number == len(known):
                    break
                start = max(now[rank], known[number])
            if first[rank] is None:
                first[rank] = start
            now[rank] = start + durations[op][stage]
            done[code] += 1
            place[rank] += 1
            if op < 2 and (following := problem.following[2 * stage + op]) is not None:
                arrivals[following.step].append(now[rank] + following.hop)
                if following.rank != rank:
                    ready.append(following.rank)
    if any(place[rank] < len(order) for rank, order in enumerate(orders)):
        return None
    return max(now) if from_start else max(end - (start or 0.0) for end, start in zip(now, first))
