"""Simulated annealing: small changes to a skeleton or to whole orders, kept if they shorten them.

`anneal` changes a skeleton. `polish` changes whole orders, since it can pay to run a W even when a rank would not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from random import Random

from penstock.schedule.search.problem import TOLERANCE, Codes, Problem
from penstock.schedule.search.weave import weave

# By how many places an action is moved in its rank's order.
_MOVES = (1, 1, -2, 2, 3, -3)


@dataclass(frozen=True, slots=True)
class Cooling:
    """The effort of simulated annealing."""

    #: The number of changes to try.
    num_steps: int
    #: The growth of the span that is accepted at first, in mean actions.
    heat: float


def anneal(
    problem: Problem, skeleton: Codes, allowed_span: float | None, least: float, cooling: Cooling
) -> list[Codes]:
    """Move one action of one rank at a time; return the skeletons found, each shorter than the one before.

    The search stops once the span is `least`. Equal calls give equal results.
    """
    current = [list(steps) for steps in skeleton]

    def span(moved: list[int]) -> float | None:
        woven = weave(problem, current, allowed_span)
        return None if woven is None else woven[0]

    return list(shorter(current, span, _MOVES, least, cooling, problem.mean_action))


def shorter(
    current: Codes,
    span: Callable[[list[int]], float | None],
    moves: Sequence[int],
    least: float,
    cooling: Cooling,
    mean_action: float,
) -> Iterator[Codes]:
    """Move one action of one rank in `current` at a time; yield a copy whenever it is shorter than all before.

    `span` measures `current`; it takes the order of the rank that changed, and returns None if that cannot be carried
    out. A change that makes the span longer is sometimes kept; the longer and later, the less likely.
    """
    random = Random(cooling.num_steps)
    now = span(current[0])
    if now is None:
        return
    shortest, heat = now, cooling.heat * mean_action
    for step in range(cooling.num_steps):
        if shortest <= least + TOLERANCE:
            return
        steps = random.choice(current)
        source = random.randrange(len(steps))
        target = source + random.choice(moves)
        if not 0 <= target < len(steps) or steps[source] == steps[target]:
            continue
        steps.insert(target, steps.pop(source))
        changed = span(steps)
        heat_now = heat * (1 - step / cooling.num_steps)
        # Kept where it is no longer, and while it is hot also where it is a little longer.
        if changed is None or not (
            changed - now <= TOLERANCE or (heat_now > 0 and random.random() < exp((now - changed) / heat_now))
        ):
            steps.insert(source, steps.pop(target))
            continue
        now = changed
        if now < shortest - TOLERANCE:
            shortest = now
            yield [list(order) for order in current]


# By how many places an action is moved in its rank's order.
MOVES = (1, -1, 1, -1, 2, -2, 3, -3, 5, -5)


def polish(problem: Problem, orders: Codes, least: float, cooling: Cooling) -> Codes:
    """Move one action of one rank at a time in whole orders; return the shortest orders found.

    The search stops once the span is `least`. Equal calls give equal results.
    """
    current = [list(order) for order in orders]
    assert span_of(problem, current) is not None, "orders that can be carried out have a span"

    def span(moved: list[int]) -> float | None:
        return span_of(problem, current) if _fits(problem, moved) else None

    return [orders, *shorter(current, span, MOVES, least, cooling, problem.mean_action)][-1]


def _fits(problem: Problem, order: list[int]) -> bool:
    """True if a rank's order keeps to the memory limit."""
    share, live = problem.weight_memory_share, 0.0
    change = (1.0, share - 1.0, -share)
    for code in order:
        live += change[code % 3]
        if live > problem.max_tapes + TOLERANCE:
            return False
    return True


def span_of(problem: Problem, orders: Codes) -> float | None:
    """The longest time over ranks from a rank's own first start to its own end; None if the ranks cannot end."""
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
    return max(end - (start or 0.0) for end, start in zip(now, first))
