"""Small changes to a skeleton, kept where they shorten the span: simulated annealing."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from random import Random

from penstock.schedule.builders.search_problem import TOLERANCE, Codes, Problem
from penstock.schedule.builders.search_weave import weave

# By how many places an action is moved in its rank's order.
_MOVES = (1, 1, -2, 2, 3, -3)


@dataclass(frozen=True, slots=True)
class Cooling:
    """How many changes are tried, and by how many mean actions longer the span may become at first."""

    num_steps: int
    heat: float


def anneal(
    problem: Problem, skeleton: Codes, allowed_span: float | None, least: float, cooling: Cooling
) -> list[Codes]:
    """The skeletons, each shorter than the one before, that come of moving one action of one rank at a time.

    A change that makes the span longer is kept at times, the less likely the longer and the later. Nothing is tried
    once the span is `least`. The same call has the same result.
    """
    random = Random(cooling.num_steps)
    current = [list(steps) for steps in skeleton]
    start = weave(problem, current, allowed_span)
    if start is None:
        return []
    span = shortest = start.span
    found: list[Codes] = []
    heat = cooling.heat * problem.mean_action
    for step in range(cooling.num_steps):
        if shortest <= least + TOLERANCE:
            break
        steps = random.choice(current)
        source = random.randrange(len(steps))
        target = source + random.choice(_MOVES)
        if not 0 <= target < len(steps) or steps[source] == steps[target]:
            continue
        steps.insert(target, steps.pop(source))
        changed = weave(problem, current, allowed_span)
        if changed is None or not _keep(changed.span - span, heat * (1 - step / cooling.num_steps), random):
            steps.insert(source, steps.pop(target))
            continue
        span = changed.span
        if span < shortest - TOLERANCE:
            shortest = span
            found.append([list(order) for order in current])
    return found


def _keep(longer: float, heat: float, random: Random) -> bool:
    return longer <= TOLERANCE or (heat > 0 and random.random() < exp(-longer / heat))
