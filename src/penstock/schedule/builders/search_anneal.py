"""Small changes to a skeleton, kept where they shorten the span: simulated annealing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    Nothing is tried once the span is `least`. The same call has the same result.
    """
    current = [list(steps) for steps in skeleton]

    def span(moved: list[int]) -> float | None:
        woven = weave(problem, current, allowed_span)
        return None if woven is None else woven.span

    return list(shorter(current, span, _MOVES, least, cooling, problem.mean_action))


def shorter(
    current: Codes,
    span: Callable[[list[int]], float | None],
    moves: Sequence[int],
    least: float,
    cooling: Cooling,
    mean_action: float,
) -> Iterator[Codes]:
    """Copies of `current`, each shorter than the one before, as one action of one rank is moved at a time in it.

    `span` measures `current` and is given the rank's order that was moved; None where that can not be carried out.
    A change that makes the span longer is kept at times, the less likely the longer and the later.
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
        if changed is None or not _keep(changed - now, heat * (1 - step / cooling.num_steps), random):
            steps.insert(source, steps.pop(target))
            continue
        now = changed
        if now < shortest - TOLERANCE:
            shortest = now
            yield [list(order) for order in current]


def _keep(longer: float, heat: float, random: Random) -> bool:
    return longer <= TOLERANCE or (heat > 0 and random.random() < exp(-longer / heat))
