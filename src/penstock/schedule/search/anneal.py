"""Simulated annealing: small changes to a skeleton or to whole orders, kept if they shorten them.

`anneal` changes a skeleton. `polish` changes whole orders, since it can pay to run a W even when a rank would not wait.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import exp
from random import Random

from penstock.schedule.search.problem import TOLERANCE, Codes, Problem
from penstock.schedule.search.weave import weave

# By how many places an action is moved in its rank's order: in a skeleton, and in a whole order.
_MOVES, _MOVES_OF_ALL = (1, 1, -2, 2, 3, -3), (1, -1, 1, -1, 2, -2, 3, -3, 5, -5)


def anneal(
    problem: Problem, skeleton: Codes, allowed_span: float | None, least: float, num_steps: int, heat: float
) -> list[Codes]:
    """Move one action of one rank at a time; return the skeletons found, each shorter than the one before.

    The search stops once the span is `least`. Equal calls give equal results.

    num_steps: of changes to try. heat: the growth of the span that is accepted at first, in mean actions.
    """
    current = [list(steps) for steps in skeleton]

    def span(moved: list[int]) -> float | None:
        woven = weave(problem, current, allowed_span)
        return None if woven is None else woven[0]

    return list(shorter(current, span, _MOVES, least, num_steps, heat * problem.mean_action))


def shorter(
    current: Codes,
    span: Callable[[list[int]], float | None],
    moves: Sequence[int],
    least: float,
    num_steps: int,
    heat: float,
) -> Iterator[Codes]:
    """Move one action of one rank in `current` at a time; yield a copy whenever it is shorter than all before.

    `span` measures `current`; it takes the order of the rank that changed, and returns None if that cannot be carried
    out. A change that makes the span longer is sometimes kept; the longer and later, the less likely.
    """
    random = Random(num_steps)
    now = span(current[0])
    if now is None:
        return
    shortest = now
    for step in range(num_steps):
        if shortest <= least + TOLERANCE:
            return
        steps = random.choice(current)
        source = random.randrange(len(steps))
        target = source + random.choice(moves)
        if not 0 <= target < len(steps) or steps[source] == steps[target]:
            continue
        steps.insert(target, steps.pop(source))
        changed = span(steps)
        heat_now = heat * (1 - step / num_steps)
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


def polish(problem: Problem, orders: Codes, least: float, num_steps: int, heat: float) -> Codes:
    """Move actions as `anneal` does, but in whole orders; return the shortest orders found."""
    current = [list(order) for order in orders]
    share, most = problem.weight_memory_share, problem.max_tapes + TOLERANCE
    changes = (1.0, share - 1.0, -share) * problem.num_stages

    def span(moved: list[int]) -> float | None:
        fits = max(accumulate(map(changes.__getitem__, moved))) <= most
        return span_of(problem, current) if fits else None

    return [orders, *shorter(current, span, _MOVES_OF_ALL, least, num_steps, heat * problem.mean_action)][-1]


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
