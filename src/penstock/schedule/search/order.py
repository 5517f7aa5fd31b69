"""The search for the shortest order within a memory limit.

It makes many skeletons, weaves W into each, and tries small changes to the best. Few microbatches are enough to find
the best skeleton; with more, only the steady middle of an order grows, so that middle is repeated.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import inf
from operator import attrgetter

from penstock.schedule.actions import Schedule, ScheduleError
from penstock.schedule.costs import Costs, PerLink, PerStage
from penstock.schedule.lower import lower
from penstock.schedule.placement import Placement, PlacementKind
from penstock.schedule.search.anneal import anneal, polish
from penstock.schedule.search.problem import TOLERANCE, Codes, Maker, Problem, lower_bound
from penstock.schedule.search.skeletons import (
    PRIORITIES,
    Priority,
    alternating,
    by_priority,
    microbatch_by_microbatch,
    patterns,
    there_and_back,
    warm_ups,
)
from penstock.schedule.search.weave import weave
from penstock.schedule.verify import verify
from penstock.settings import ScheduleConfig, SearchedPlacement, Settings, same_as
from penstock.settings.declare import checked


@checked
@dataclass(frozen=True)
class SearchOptions(Settings, section="schedule"):
    """The times and limits that a search finds an order for, and its effort.

    A time is that of one microbatch through all stages of a rank, or a list with one for each stage of the model, as in
    `Costs`. A microbatch counts 1 from its F to its I, and `weight_memory_share` from then to its W; a stage's tape
    counts as its share of the rank's stages.
    """

    #: The placement of the stages, or the rank of each; None for a loop.
    placement: SearchedPlacement | str | tuple[int, ...] | None = same_as(ScheduleConfig, "placement")
    #: The most microbatches that a rank keeps at any time; None for p. 1 is enough for any schedule.
    max_live_microbatches: float | None = same_as(ScheduleConfig, "max_live_microbatches")
    #: The weight of a microbatch between its I and its W, from 0 to 1.
    weight_memory_share: float = 1.0
    #: The time of F.
    forward: PerStage = 1.0
    #: The time of I.
    backward_input: PerStage = 1.0
    #: The time of W.
    backward_weight: PerStage = 1.0
    #: The time of a message between two ranks; of a list for each link, the longest counts.
    transfer: PerLink = 0.0
    #: A factor on the number of small changes to try if the lower bound is not reached.
    effort: float = 1.0


def shortest(placement: Placement, microbatches: int, options: SearchOptions) -> Schedule:
    """Find the shortest order for the options' times and memory; `options.placement` is not read here.

    Raises: ValueError naming an impossible option.
    """
    if not options.effort >= 0:
        raise ValueError(f"effort must be at least 0, got {options.effort!r}")
    most = options.max_live_microbatches
    names = ("forward", "backward_input", "backward_weight", "transfer", "weight_memory_share")
    costs = Costs(**{name: getattr(options, name) for name in names})
    problem = Problem.of(placement, microbatches, costs, placement.num_ranks if most is None else most, max)
    return problem.schedule("auto", search(problem, options.effort))


# By how many mean actions the span may exceed the lower bound while W are woven in; None lets no rank wait longer than
# another.
_ALLOWANCES = (0.0, 0.5, 1.0, 2.0, 4.0, inf, None)

# The number of actions to weave in each part of the search, which takes about a second.
_NUM_ACTIONS = 2_500_000

# Up to this number of actions, whole orders are changed too; with more, changes to one action at a time achieve nothing
# in the available time.
_NUM_ACTIONS_POLISHED = 400

# Up to this number of actions, skeletons are compared at their full length.
_NUM_ACTIONS_AT_ONCE = 3_000


@dataclass(frozen=True, slots=True)
class _FoundOrders:
    """Orders with their span and their origin."""

    span: float
    orders: Codes
    #: The skeleton that W were woven into.
    skeleton: Codes
    #: Makes the skeleton; None if it has been changed.
    make: Maker | None
    #: That of `_ALLOWANCES` with which they were woven.
    allowance: float | None


def search(problem: Problem, effort: float = 1.0) -> Codes:
    """Find the shortest orders that are legal even if a send waits for its receive.

    If no skeleton reaches the lower bound, small changes are tried; `effort` scales their number. The result for a
    problem depends neither on chance nor on the clock.
    """
    few = _Trials(replace(problem, num_microbatches=_few(problem)))
    trials = few if few.problem == problem else _Trials(problem)
    candidates = few.compare()
    if not few.solved_by(candidates[0]):
        candidates = sorted(few.change(candidates, effort) + candidates, key=_span)
    if trials is not few:
        candidates = trials.finalists(candidates)
    best = next(candidate for candidate in sorted(candidates, key=_span) if trials.legal(candidate))
    return trials.polish(best, effort) if problem.num_actions <= _NUM_ACTIONS_POLISHED else best.orders


def _few(problem: Problem) -> int:
    """A number of microbatches that shows how good a skeleton is for all of them: 3p or a little more.

    The rest is a multiple of 12, so that pieces of 1 to 4 microbatches can be repeated. The number is the least whose
    lower bound has no more bubble than that of all: with few microbatches, W may be too few to fill the end.
    """
    total = problem.num_microbatches
    least = 3 * problem.num_ranks
    if total <= least or problem.num_actions <= _NUM_ACTIONS_AT_ONCE:
        return total
    bubble = _bubble(problem)
    for number in range(least + (total - least) % 12, total, 12):
        if _bubble(replace(problem, num_microbatches=number)) <= bubble + TOLERANCE * max(problem.work):
            return number
    return total


def _bubble(problem: Problem) -> float:
    return lower_bound(problem) - max(problem.work)


_span = attrgetter("span")


class _Trials:
    """Trials of skeletons on one problem, measured against its lower bound."""

    #: The problem, and the lower bound of its span.
    problem: Problem
    least: float
    #: The difference from which on one span is longer than another.
    tolerance: float

    def __init__(self, problem: Problem) -> None:
        self.problem, self.least = problem, lower_bound(problem)
        self.tolerance = TOLERANCE * max(1.0, *problem.work)

    def solved_by(self, candidate: _FoundOrders) -> bool:
        return candidate.span <= self.least + self.tolerance and self.legal(candidate)

    def legal(self, candidate: _FoundOrders) -> bool:
        """True if the orders end even if a send waits for its receive and receives are posted late."""
        try:
            verify(lower(self.problem.schedule("auto", candidate.orders), receives_ahead=1))
        except ScheduleError:
            return False
        return True

    def compare(self) -> list[_FoundOrders]:
        """Make all candidates, the best first; stop at one that solves the problem.

        Once many actions have been woven, each remaining skeleton is tried with one allowance, and the best with all.
        """
        alone = self.weave(microbatch_by_microbatch(self.problem), microbatch_by_microbatch, _ALLOWANCES)
        assert alone is not None, "one microbatch at a time fits in any memory"
        candidates, glimpsed = [alone], list[_FoundOrders]()
        num_left = _NUM_ACTIONS
        for make in self._makers():
            candidate = self.weave(make(self.problem), make, _ALLOWANCES if num_left > 0 else _ALLOWANCES[2:3])
            if candidate is not None:
                (candidates if num_left > 0 else glimpsed).append(candidate)
                if self.solved_by(candidate):
                    break
            num_left -= self.problem.num_actions * len(_ALLOWANCES)
        best = sorted(glimpsed, key=_span)[:2]
        candidates += filter(None, (self.weave(one.skeleton, one.make, _ALLOWANCES) for one in best))
        return sorted(candidates, key=_span)

    def weave(self, skeleton: Codes, make: Maker | None, allowances: Sequence[float | None]) -> _FoundOrders | None:
        """Weave W into a skeleton with some allowances and keep the shortest; None if it takes too much memory."""
        best = None
        for allowance in allowances:
            woven = weave(self.problem, skeleton, self._allowed_span(allowance))
            if woven is None:
                return None
            span, orders = woven
            if best is None or span < best.span - self.tolerance:
                best = _FoundOrders(span, orders, skeleton, make, allowance)
        return best

    def change(self, candidates: Sequence[_FoundOrders], effort: float) -> list[_FoundOrders]:
        """Try small changes to the best skeleton and larger ones to the next; keep the best legal orders of each."""
        best = candidates[0]
        other = next((one for one in candidates if one.skeleton != best.skeleton), best)
        num_steps = int(effort * _NUM_ACTIONS / (2 * self.problem.num_actions))
        changed = []
        for start, heat in ((best, 0.2), (other, 2.0)):
            allowed_span = self._allowed_span(start.allowance)
            found = anneal(self.problem, start.skeleton, allowed_span, self.least, num_steps, heat)
            # The last few are enough: if the last is not legal, the one before is barely longer.
            tried = filter(None, (self.weave(skeleton, None, _ALLOWANCES) for skeleton in found[:-4:-1]))
            changed += islice(filter(self.legal, tried), 1)
        return changed

    def polish(self, best: _FoundOrders, effort: float) -> Codes:
        """Try small changes to whole orders; return them as they were if no legal ones are shorter."""
        if self.solved_by(best) or not effort:
            return best.orders
        num_steps = int(effort * _NUM_ACTIONS / (2 * self.problem.num_actions))
        found = polish(self.problem, best.orders, self.least, num_steps, heat=0.2)
        return found if self.legal(replace(best, orders=found)) else best.orders

    def finalists(self, candidates: Sequence[_FoundOrders]) -> list[_FoundOrders]:
        """Extend candidates for fewer microbatches: make their skeletons again, or repeat their middle."""
        found = [self.weave(microbatch_by_microbatch(self.problem), None, _ALLOWANCES[:1])]
        for candidate in candidates[: max(3, min(24, _NUM_ACTIONS // (3 * self.problem.num_actions)))]:
            if candidate.make is not None:
                found.append(self.weave(candidate.make(self.problem), None, [candidate.allowance]))
            stretched = islice(_stretched(candidate.skeleton, self.problem), 2)
            found += [self.weave(skeleton, None, [candidate.allowance]) for skeleton in stretched]
        return [candidate for candidate in found if candidate is not None]

    def _makers(self) -> Iterator[Maker]:
        """Yield the makers of skeletons, as many of each kind as are worth their time."""
        num_makers = max(4, min(64, _NUM_ACTIONS // (self.problem.num_actions * len(_ALLOWANCES))))
        placement = self.problem.placement
        if placement.stages_per_rank == 2 and placement.kind is PlacementKind.V:
            yield there_and_back
        for num_live in islice(self._warm_ups(), num_makers):
            yield partial(alternating, num_live=num_live)
        for priority, allowance in product(PRIORITIES, (0.0, 0.5, 1.0, 2.0)):
            yield partial(_dispatched, priority=priority, allowance=allowance)
        for num_live in islice(self._warm_ups(), 8):
            for priority, allowance in product(PRIORITIES[::2], (0.0, 1.0)):
                yield partial(_dispatched, priority=priority, allowance=allowance, num_live=num_live)
        found = patterns(self.problem)
        for pattern in found[:: -(-len(found) // num_makers) or 1]:
            yield pattern.skeleton

    def _warm_ups(self) -> Iterator[tuple[int, ...]]:
        """Yield numbers of live microbatches to keep to, if a rank has one stage."""
        if self.problem.placement.kind is not PlacementKind.MAP and self.problem.placement.stages_per_rank == 1:
            yield from warm_ups(self.problem, may_wait=self.least - max(self.problem.work))

    def _allowed_span(self, allowance: float | None) -> float | None:
        return None if allowance is None else self.least + allowance * self.problem.mean_action


def _dispatched(problem: Problem, priority: Priority, allowance: float, num_live: Sequence[int] | None = None) -> Codes:
    return by_priority(problem, priority, lower_bound(problem) + allowance * problem.mean_action, num_live)


def _stretched(skeleton: Codes, problem: Problem) -> Iterator[Codes]:
    """Extend a skeleton to more microbatches by repeating a piece of its middle, if the middle is steady.

    Every action occurs equally often in the piece. On every rank it lies between the same two of its first backwards.
    """
    num_microbatches = skeleton[problem.rank_of[0]].count(0)
    more = problem.num_microbatches - num_microbatches
    for length in (1, 2, 3, 4):
        number = (num_microbatches - length) // 2
        if more % length or number < 0:
            continue
        stretched = []
        for steps, stages in zip(skeleton, problem.stages_of):
            backwards = [place for place, step in enumerate(steps) if step == 2 * stages[-1] + 1]
            start, end = backwards[number], backwards[number + length]
            counts = Counter(steps[start:end])
            if set(counts.values()) != {length} or len(counts) != 2 * len(stages):
                break
            stretched.append(steps[:start] + steps[start:end] * (more // length) + steps[start:])
        else:
            yield stretched
