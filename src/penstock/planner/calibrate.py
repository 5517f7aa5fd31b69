"""The cost model's free constants from runs on the machines at hand: the settings and step times of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock import schedule
from penstock.planner.cluster import Cluster
from penstock.planner.estimate import Candidate, Workload, estimate
from penstock.planner.fit import LinearStep, fit
from penstock.planner.model_costs import RecomputedPart
from penstock.planner.times import Constants
from penstock.settings import RunConfig

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
    return Candidate(
        layout,
        config.schedule.name,
        config.schedule.stages_per_rank or schedule.default_stages(config.schedule.name),
        microbatch,
        num,
        int(config.optimizer.zero),
        RecomputedPart.FULL if config.train.recompute == "full" else RecomputedPart.NONE,
        cut=config.schedule.cut,
    )


def calibrate(
    runs: Sequence[MeasuredRun], cluster: Callable[[int], Cluster], start: Constants | None = None
) -> Constants:
    """The constants with the least relative errors over the runs' steps: `compute`, and with several runs `action_s`.

    cluster: the machines of the runs, given the number of devices.

    Raises: ValueError for a run whose schedule the planner cannot build, and for steps that no constants explain.
    """
    constants = start or Constants()
    # A step is a longest path, which the constants move: the slopes are taken anew where the last ones led.
    for _ in range(3):
        rows = [_row(run, cluster(run.candidate.layout.world_size), constants) for run in runs]
        constants = fit(rows, constants)
    for run in runs:
        found_s = _predict(run, cluster(run.candidate.layout.world_size), constants)
        if not 1 / _MOST_ERROR < run.step_s / found_s < _MOST_ERROR:
            raise ValueError(
                f"a step of {run.candidate} took {run.step_s:.3g} s, and the constants that fit best make it "
                f"{found_s:.3g} s; calibrate on runs that these very devices trained"
            )
    return constants


def _predict(run: MeasuredRun, cluster: Cluster, constants: Constants) -> float:
    return estimate(run.workload, run.candidate, cluster, constants).step_s


def _row(run: MeasuredRun, cluster: Cluster, constants: Constants) -> LinearStep:
    return LinearStep.around(lambda own: _predict(run, cluster, own), constants, run.step_s)
