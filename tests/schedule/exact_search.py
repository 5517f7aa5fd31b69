"""The optimal order of small pipelines by a constraint solver, with a proven bound: what the search is held to."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor, lcm
from typing import Any

from penstock.schedule.actions import Op, Placement, Schedule
from penstock.schedule.costs import Costs
from penstock.schedule.lower import lower
from penstock.schedule.search.order import search
from penstock.schedule.search.problem import Codes, Problem, lower_bound, problem_of
from penstock.schedule.simulate import simulate

# The solver needs whole numbers: times are scaled by the least of these factors that makes them whole, or the last.
_SCALES = tuple(10**digits for digits in range(7))


@dataclass(frozen=True)
class Optimum:
    """The shortest schedule found, and a proven bound."""

    schedule: Schedule
    span: float
    #: No schedule's span is below it.
    bound: float

    @property
    def is_proven(self) -> bool:
        """True if no schedule is shorter, up to the rounding of times."""
        return self.span <= self.bound * (1 + 1e-6)


def optimum(
    placement: Placement, microbatches: int, costs: Costs, limit: float, *, time_limit_s: float = 60.0, workers: int = 1
) -> Optimum:
    """Find the shortest schedule with at most `limit` live microbatches on a rank, within the solver's time limit.

    Span and memory are defined as in `bound`. Four ranks and eight microbatches take seconds to minutes; with more, the
    result is the search's order or a better one, and the bound. Equal calls give equal results if the solver finishes
    in time with one worker.

    Raises: ValueError for what `bound` refuses and for unequal lengths.
    """
    if len(set(costs.lengths)) > 1:
        raise ValueError("the optimum needs microbatches of one length, but lengths differ")
    problem = problem_of(placement, microbatches, costs, min(limit, microbatches))
    found = search(problem)
    model = _Model(problem, found)
    solved, bound = model.solve(time_limit_s, workers)
    spans = [(_span(problem, orders), orders) for orders in (found, solved) if orders is not None]
    span, orders = min(spans, key=lambda pair: pair[0])
    return Optimum(problem.schedule("optimum", orders), span, min(span, max(bound, lower_bound(problem))))


def _span(problem: Problem, orders: Codes) -> float:
    costs = Costs(problem.forward, problem.backward_input, problem.backward_weight, problem.transfer)
    return simulate(lower(problem.schedule("optimum", orders)), costs).span_cost


class _Model:
    """The problem in the solver's terms: the starts of all actions, one at a time on each rank, within the memory.

    Times that are not whole at any scale are rounded down. The true starts of any order, rounded down too, are then a
    solution whose span is at most one unit too long. So the bound less one unit holds for the true times.
    """

    #: `starts[code][microbatch]`, where code numbers the actions as in an order.
    starts: list[list[Any]]
    #: `durations[op][stage]`.
    durations: list[list[int]]
    #: The latest possible start.
    horizon: int
    #: The problem, and the solver that is asked.
    problem: Problem
    #: The solver's model.
    model: Any
    #: Units of the solver's time in one of the problem's, and True if times are rounded to them.
    scale: int
    is_rounded: bool

    def __init__(self, problem: Problem, hint: Codes) -> None:
        # Here and below, for whoever only collects tests: it brings pandas.
        from ortools.sat.python import cp_model

        self.problem = problem
        self.model = cp_model.CpModel()
        times = (*problem.forward, *problem.backward_input, *problem.backward_weight, problem.transfer)
        self.scale = next((scale for scale in _SCALES if all(_is_whole(time * scale) for time in times)), _SCALES[-1])
        self.is_rounded = not all(_is_whole(time * self.scale) for time in times)
        self.durations = [
            [self._scaled(time) for time in of_stages]
            for of_stages in (problem.forward, problem.backward_input, problem.backward_weight)
        ]
        # Running one microbatch at a time takes no longer than this.
        once = sum(sum(of_stages) for of_stages in self.durations) + 2 * sum(map(self._scaled, problem.hops))
        self.horizon = once * problem.num_microbatches
        self.starts = [
            [self.model.new_int_var(0, self.horizon, "") for _ in range(problem.num_microbatches)]
            for _ in range(3 * problem.num_stages)
        ]
        self._add_order()
        for stages in problem.stages_of:
            self._add_rank(stages)
        self._add_span()
        self._add_hint(hint)

    def solve(self, time_limit_s: float, workers: int) -> tuple[Codes | None, float]:
        """Find the best orders, if any, and a proven bound."""
        from ortools.sat.python import cp_model

        solver: Any = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        bound = (solver.best_objective_bound - self.is_rounded) / self.scale
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound
        orders = []
        for stages in self.problem.stages_of:
            codes = [3 * stage + op for stage in stages for op in range(3)]
            # Actions that take no time start together; those of one microbatch come in the order of their ops.
            numbered = ((code, number) for code in codes for number in range(self.problem.num_microbatches))
            timed = sorted((solver.value(self.starts[code][number]), number, code) for code, number in numbered)
            orders.append([code for _, _, code in timed])
        return orders, bound

    def _scaled(self, time: float) -> int:
        return round(time * self.scale) if _is_whole(time * self.scale) else floor(time * self.scale)

    def _end(self, code: int, microbatch: int) -> Any:
        stage, op = divmod(code, 3)
        return self.starts[code][microbatch] + self.durations[op][stage]

    def _add_order(self) -> None:
        """Order the actions along each microbatch's way, and the microbatches on each stage."""
        for code, starts in enumerate(self.starts):
            stage, op = divmod(code, 3)
            followers = [(code + 1, 0)] if op == 1 else []
            if op < 2 and (following := self.problem.following[2 * stage + op]) is not None:
                followers.append((3 * (following.step >> 1) + (following.step & 1), self._scaled(following.hop)))
            for number, start in enumerate(starts):
                if number:
                    self.model.add(start >= self._end(code, number - 1))
                for follower, hop in followers:
                    self.model.add(self.starts[follower][number] >= self._end(code, number) + hop)

    def _add_rank(self, stages: tuple[int, ...]) -> None:
        """Allow one action at a time, and no more live tapes than memory holds."""
        problem, model = self.problem, self.model
        share = Fraction(str(problem.weight_memory_share))
        max_tapes = Fraction(str(problem.max_live_microbatches)) * problem.placement.stages_per_rank
        unit = lcm(share.denominator, max_tapes.denominator)
        actions, tapes, demands = [], [], []
        for stage in stages:
            for number in range(problem.num_microbatches):
                for op, durations in enumerate(self.durations):
                    start = self.starts[3 * stage + op][number]
                    actions.append(model.new_fixed_size_interval_var(start, durations[stage], ""))
                for opened, closed, demand in ((0, 1, unit), (1, 2, int(share * unit))):
                    begin = self.starts[3 * stage][number] if opened == 0 else self._end(3 * stage + 1, number)
                    length = model.new_int_var(0, self.horizon, "")
                    tapes.append(model.new_interval_var(begin, length, self._end(3 * stage + closed, number), ""))
                    demands.append(demand)
        model.add_no_overlap(actions)
        model.add_cumulative(tapes, demands, int(max_tapes * unit))

    def _add_span(self) -> None:
        """Minimise the longest time from a rank's first start to its end; the first rank's first start is 0."""
        span = self.model.new_int_var(0, self.horizon, "")
        self.model.add(self.starts[0][0] == 0)
        for stages in self.problem.stages_of:
            first, last = self.starts[3 * stages[0]][0], self.problem.num_microbatches - 1
            for stage in stages:
                self.model.add(span >= self._end(3 * stage + 2, last) - first)
        self.model.minimize(span)

    def _add_hint(self, orders: Codes) -> None:
        costs = Costs(*(tuple(of_stages) for of_stages in self.durations), transfer=self._scaled(self.problem.transfer))
        timeline = simulate(lower(self.problem.schedule("hint", orders)), costs)
        ops = {Op.F: 0, Op.I: 1, Op.W: 2}
        for event in (event for events in timeline.events for event in events):
            action: Any = event.action
            if action.op in ops:
                start = self.starts[3 * action.stage + ops[action.op]][action.microbatch]
                self.model.add_hint(start, round(event.start))


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) < 1e-7
