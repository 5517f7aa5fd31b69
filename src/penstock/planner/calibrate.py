"""The cost model's free constants from runs on the machines at hand: the settings and step times of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum

from penstock import schedule
from penstock.planner.cluster import Cluster
from penstock.planner.estimate import Candidate, Workload, estimate
from penstock.planner.model_costs import RecomputedPart
from penstock.planner.times import LEAST_COMPUTE, MOST_COMPUTE, Constants
from penstock.settings import RunConfig

Predict = Callable[[Constants], float]
"""The step's seconds under some constants."""


@dataclass(frozen=True)
class LinearStep:
    """A step's seconds around some constants, as ``fixed + slowness / compute + actions * action_s``.

    A simulated step is a longest path, so this is exact as long as the path stays the same.
    """

    fixed: float
    slowness: float
    actions: float
    measured_s: float

    @classmethod
    def around(cls, predict: Predict, constants: Constants, measured_s: float) -> LinearStep:
        """Take the slopes from three predictions."""
        slower = replace(constants, compute=constants.compute / 1.05)
        delay = max(constants.action_s, 1e-4) / 4
        base = predict(constants)
        slowness = (predict(slower) - base) / (1 / slower.compute - 1 / constants.compute)
        actions = (predict(replace(constants, action_s=constants.action_s + delay)) - base) / delay
        fixed = base - slowness / constants.compute - actions * constants.action_s
        return cls(fixed, slowness, actions, measured_s)


def fit(rows: Sequence[LinearStep], start: Constants) -> Constants:
    """The constants with the least sum of squared relative errors over some measured steps.

    The time of an action is at least none, and `compute` lies between 0.02 and 1; at its limit the other constant is
    fitted alone. With one row, `compute` alone is fitted; with none, nothing.
    """
    if not rows:
        return start
    slowness = [row.slowness / row.measured_s for row in rows]
    actions = [row.actions / row.measured_s for row in rows]
    wanted = [1 - row.fixed / row.measured_s for row in rows]
    x, y = _solve(slowness, actions, wanted) if len(rows) > 1 else (0.0, -1.0)
    if y < 0 or x <= 0:
        y = 0.0
        x = _dot(slowness, wanted) / (_dot(slowness, slowness) or 1.0)
    if x < 1 / MOST_COMPUTE and len(rows) > 1:
        left = [want - slow / MOST_COMPUTE for want, slow in zip(wanted, slowness, strict=True)]
        y = max(0.0, _dot(actions, left) / (_dot(actions, actions) or 1.0))
    compute = min(MOST_COMPUTE, max(LEAST_COMPUTE, 1 / x if x > 0 else MOST_COMPUTE))
    return replace(start, compute=compute, action_s=y)


def _solve(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> tuple[float, float]:
    """The least squares of ``a x + b y = c``; y is -1 where both columns say the same."""
    aa, ab, bb, ac, bc = _dot(a, a), _dot(a, b), _dot(b, b), _dot(a, c), _dot(b, c)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return 0.0, -1.0
    return (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return fsum(x * y for x, y in zip(a, b, strict=True))


# Its first steps allocate, compile and meet; fewer than these others are no basis.
_FIRST_STEPS, _LEAST_STEPS = 2, 3
# Steps that are this many times as long as the fitted constants make them are not those of such devices.
_MOST_ERROR = 1.5


@dataclass(frozen=True)
class MeasuredRun:
    """A run of this engine: what it trained, how, and the seconds of a step."""

    workload: Workload
    candidate: Candidate
    step_s: float


def median_step_s(step_times_s: Sequence[float]) -> float:
    """The median of a run's step times without the first two.

    Raises: ValueError for fewer than five steps.
    """
    rest = step_times_s[_FIRST_STEPS:]
    if len(rest) < _LEAST_STEPS:
        raise ValueError(
            f"it has the times of {len(step_times_s)} steps; at least {_FIRST_STEPS + _LEAST_STEPS} are needed, of "
            f"which the first {_FIRST_STEPS} do not count"
        )
    return statistics.median(rest)


def candidate_of(config: RunConfig) -> Candidate:
    """The layout and order in which a run trains.

    Raises: ValueError where its microbatches are not of equally many whole sequences.
    """
    layout, num = config.parallel, config.train.num_microbatches
    microbatch, rest = divmod(config.data.num_sequences, layout.dp * num)
    if rest or not microbatch or config.train.max_microbatch_tokens is not None:
        raise ValueError(
            f"{config.data.num_sequences} sequences a step, {layout.dp} data-parallel ranks and {num} microbatches do "
            "not give microbatches of equally many whole sequences"
        )
    cut = config.schedule.cut
    if isinstance(cut, str):
        cut = schedule.read_layout(cut, config.model.num_units, config.model.units_per_layer)
    return Candidate(
        layout,
        config.schedule.name,
        config.schedule.stages_per_rank or schedule.default_stages(config.schedule.name),
        microbatch,
        num,
        int(config.optimizer.zero),
        RecomputedPart.FULL if config.train.recompute == "full" else RecomputedPart.NONE,
        cut=cut,
    )


def calibrate(
    runs: Sequence[MeasuredRun], cluster: Callable[[int], Cluster], start: Constants | None = None
) -> Constants:
    """The constants with the least relative errors over the runs' steps: `compute`, and with several runs `action_s`.

    cluster: the machines of the runs, given the number of devices.

    Raises: ValueError for a run whose schedule the planner cannot build, and for steps that no constants explain.
    """

    def step_of(run: MeasuredRun) -> Predict:
        machines = cluster(run.candidate.layout.world_size)
        return lambda constants: estimate(run.workload, run.candidate, machines, constants).step_s

    constants = start or Constants()
    # A step is a longest path, which the constants move: the slopes are taken anew where the last ones led.
    for _ in range(3):
        constants = fit([LinearStep.around(step_of(run), constants, run.step_s) for run in runs], constants)
    for run in runs:
        found_s = step_of(run)(constants)
        if not 1 / _MOST_ERROR < run.step_s / found_s < _MOST_ERROR:
            raise ValueError(
                f"a step of {run.candidate} took {run.step_s:.3g} s, and the constants that fit best make it "
                f"{found_s:.3g} s; calibrate on runs that these very devices trained"
            )
    return constants
