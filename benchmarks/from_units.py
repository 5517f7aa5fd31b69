"""Steps of this engine from the measured times of a model's units: the same constants, fitted to a few known steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock import schedule
from penstock.planner.calibrate import LinearStep, fit
from penstock.planner.times import Constants, Order, simulate_step

_TIMES = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class UnitStep:
    """A step by the times of its units, each of one microbatch, in seconds.

    cut: the number of units of each stage.
    """

    order: Order
    cut: tuple[int, ...]
    units: schedule.Costs

    def seconds(self, constants: Constants) -> float:
        """From the first action to the last, if units are as fast as `constants.compute` of what they are alone."""
        slower = 1 / constants.compute
        times = {name: [slower * own for own in getattr(self.units, name)] for name in _TIMES}
        cut = [range(first, end) for first, end in pairwise(accumulate(self.cut, initial=0))]
        costs = schedule.costs_of_cut(replace(self.units, **times), cut)
        return simulate_step(self.order, replace(costs, action=constants.action_s)).makespan


def fit_constants(known: Sequence[tuple[UnitStep, float]]) -> Constants:
    """The constants that fit known steps and their seconds: `compute`, and with several steps `action_s`."""
    constants = Constants(compute=0.95, action_s=0.0)
    # A step is a longest path, which the constants move: the slopes are taken anew where the last ones led.
    for _ in range(2):
        constants = fit([LinearStep.around(step.seconds, constants, seconds) for step, seconds in known], constants)
    return constants
