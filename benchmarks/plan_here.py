"""Errors of the planner's predictions of steps on this machine, made before they are run.

In each round the model's units are timed first, on all ranks at once, and a few runs whose steps are given to the
planner; only then are all others run: schedules, cuts and microbatches on two ranks. Steps of emulated devices follow.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any

import torch

from benchmarks import schedules
from benchmarks.common import main, new_parser, progress
from benchmarks.ranks import Turn, in_turns
from benchmarks.train import NUM_RANKS, RATE, Training
from penstock.cli.options import Parser
from penstock.cli.output import print_table
from penstock.data import MicroBatchSpec
from penstock.engine import Engine, EngineOptions
from penstock.engine.cut import times_here
from penstock.planner.calibrate import LinearStep, fit
from penstock.planner.times import Constants, Order, simulate_step
from penstock.schedule import Costs, Timeline, costs_of_cut, parts
from penstock.schedule.actions import COMPUTE
from penstock.settings import Layout, LearningRate, OptimizerConfig, ScheduleConfig

MODEL = Training.of(
    *("--layers", "8", "--hidden-size", "256", "--intermediate-size", "704"),
    *("--vocab-size", "2048", "--sequence-tokens", "128"),
)
NUM_SEQUENCES = 16
_UNITS = "units"


@dataclass(frozen=True)
class Combination:
    """A schedule, the numbers of units of its stages, and the microbatches into which a step's sequences are cut."""

    name: str
    cut: tuple[int, ...]
    num_microbatches: int

    def __str__(self) -> str:
        return f"{self.name} {'-'.join(map(str, self.cut))}, {self.num_microbatches} microbatches"

    @property
    def stages_per_rank(self) -> int:
        return len(self.cut) // NUM_RANKS

    @property
    def training(self) -> Training:
        """The model with this combination's microbatches."""
        sequences = NUM_SEQUENCES // self.num_microbatches
        return replace(MODEL, num_microbatches=self.num_microbatches, microbatch_sequences=sequences)


_EVEN, _EVEN_IN_FOUR = MODEL.even_cut(2), MODEL.even_cut(4)

KNOWN = (
    Combination("1f1b", _EVEN, 4),
    Combination("1f1b", _EVEN, 16),
    Combination("interleaved", _EVEN_IN_FOUR, 16),
)
"""The runs whose steps are given: few long actions, many, and many short ones."""

COMBINATIONS = (
    Combination("1f1b", _EVEN, 8),
    Combination("1f1b", (11, 7), 8),
    Combination("1f1b", (7, 11), 16),
    Combination("afab", _EVEN, 4),
    Combination("afab", (11, 7), 16),
    Combination("interleaved", _EVEN_IN_FOUR, 4),
    Combination("looped-bfs", _EVEN_IN_FOUR, 8),
    Combination("zb-h1", _EVEN, 4),
    Combination("zb-h1", (11, 7), 8),
    Combination("zb-h2", _EVEN, 16),
    Combination("zb-v", _EVEN_IN_FOUR, 8),
    Combination("zb-v", (6, 5, 4, 3), 16),
    Combination("dualpipe-v", _EVEN_IN_FOUR, 4),
)

EMULATED_NAMES = ("afab", "1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v")
EMULATED_SIZES = ((4, 8), (8, 16))
"""Ranks and microbatches."""


@dataclass(frozen=True)
class StepTime:
    """A step's seconds, and those of it before and after its microbatches are computed."""

    step_s: float
    rest_s: float


@dataclass(frozen=True)
class Round:
    """One round: the units' times in seconds by number of microbatches, and the steps of all combinations."""

    units: dict[int, Costs]
    steps: dict[Combination, StepTime]


def run_all(num_rounds: int) -> list[Round]:
    """Time the units and run each combination, in turns; one round more than asked for warms up."""
    sides = {str(one): one for one in (*KNOWN, *COMBINATIONS)}
    found = in_turns([_UNITS, *sides], NUM_RANKS, _prepare, sides, num_rounds=num_rounds)
    return [
        Round(
            _mean_times([of_rank[i] for of_rank in found[_UNITS]]),
            {
                one: StepTime(*map(max, zip(*(of_rank[i] for of_rank in found[what]), strict=True)))
                for what, one in sides.items()
            },
        )
        for i in range(num_rounds)
    ]


def _mean_times(of_ranks: Sequence[dict[int, list[list[float]]]]) -> dict[int, Costs]:
    """The units' times by number of microbatches, the mean of the ranks'."""
    found = {}
    for number in of_ranks[0]:
        # Of F, I and W, each rank's list over the units.
        parts = zip(*(own[number] for own in of_ranks), strict=True)
        forward, inputs, weights = ([mean(unit) for unit in zip(*ranks, strict=True)] for ranks in parts)
        found[number] = Costs(forward, inputs, weights)
    return found


def _prepare(side: str, rank: int, sides: dict[str, Combination]) -> Turn:
    return _units if side == _UNITS else _step(sides[side])


def _units() -> dict[int, list[list[float]]]:
    """The units' times of F, I and W by number of microbatches, measured while all ranks compute."""
    options, device = EngineOptions(device="cpu"), torch.device("cpu")
    found: dict[int, Any] = {}
    for combination in (*KNOWN, *COMBINATIONS):
        if combination.num_microbatches not in found:
            own = combination.training
            times = times_here(own.units(), own.hidden_size, own.lengths, options, device)
            found[combination.num_microbatches] = [times.forward, times.backward_input, times.backward_weight]
    return found


def _step(combination: Combination) -> Turn:
    """A step's seconds, and those before and after this rank computes its microbatches."""
    training = combination.training
    engine = Engine(
        training.units(),
        training.hidden_size,
        Layout(pp=NUM_RANKS),
        EngineOptions(
            schedule=ScheduleConfig(combination.name, cut=combination.cut, stages_per_rank=combination.stages_per_rank),
            optimizer=OptimizerConfig(LearningRate(RATE), clip_norm=0),
            device="cpu",
        ),
    )
    batch, spec = training.batch(), MicroBatchSpec(num=training.num_microbatches)

    def turn() -> tuple[float, float]:
        start = time.perf_counter()
        engine.train_batch(batch, micro_batches=spec)
        took = time.perf_counter() - start
        # Only rank 0 has the timeline, and counts.
        timeline = engine.timeline()
        return took, took - _computing_s(timeline) if timeline is not None else 0.0

    return turn


def _computing_s(timeline: Timeline) -> float:
    """Seconds from a step's first action to the last of its microbatches."""
    steps = (event for events in timeline.events for event in events)
    return max(event.end for event in steps if parts(event.action)[0].op in COMPUTE) / 1e3


# ---- Predictions from the times of units, by constants that a few known steps give

_TIMES = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class UnitStep:
    """A step by the times of its units, each of one microbatch, in seconds.

    cut: the number of units of each stage.
    """

    order: Order
    cut: tuple[int, ...]
    units: Costs

    def seconds(self, constants: Constants) -> float:
        """From the first action to the last, if units are as fast as `constants.compute` of what they are alone."""
        slower = 1 / constants.compute
        times = {name: [slower * own for own in getattr(self.units, name)] for name in _TIMES}
        cut = [range(first, end) for first, end in pairwise(accumulate(self.cut, initial=0))]
        costs = costs_of_cut(replace(self.units, **times), cut)
        return simulate_step(self.order, replace(costs, action=constants.action_s)).makespan


def fit_constants(known: Sequence[tuple[UnitStep, float]]) -> Constants:
    """The constants that fit known steps and their seconds: `compute`, and with several steps `action_s`."""
    constants = Constants(compute=0.95, action_s=0.0)
    # A step is a longest path, which the constants move: the slopes are taken anew where the last ones led.
    for _ in range(2):
        constants = fit([LinearStep.around(step.seconds, constants, seconds) for step, seconds in known], constants)
    return constants


@dataclass(frozen=True)
class Foreseen:
    """A step's seconds by round: predicted before it was run, and measured."""

    what: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median over rounds of the relative error within the round: machines drift."""
        return statistics.median(
            predicted / measured - 1 for predicted, measured in zip(self.predicted_s, self.measured_s, strict=True)
        )


def foreseen(combination: Combination, rounds: Sequence[Round]) -> Foreseen:
    """A combination's steps, predicted from what each round measured before it."""
    predicted = []
    for one in rounds:
        known = [(_unit_step(run, one), one.steps[run].step_s - one.steps[run].rest_s) for run in KNOWN]
        rest_s = statistics.median(one.steps[run].rest_s for run in KNOWN)
        predicted.append(_unit_step(combination, one).seconds(fit_constants(known)) + rest_s)
    return Foreseen(str(combination), tuple(predicted), tuple(one.steps[combination].step_s for one in rounds))


def _unit_step(combination: Combination, round_: Round) -> UnitStep:
    """A combination's step, in the order that the engine follows, by the units' times of a round."""
    number = combination.num_microbatches
    order = Order(combination.name, NUM_RANKS, number, combination.stages_per_rank, early_gradients=True)
    return UnitStep(order, combination.cut, round_.units[number])


def _emulated(emulation: schedules.Emulation) -> Iterator[Foreseen]:
    for row in schedules.compare(EMULATED_NAMES, [emulation], against_torch=False):
        own = row["penstock"]
        what = f"{row['schedule']}, {emulation.num_microbatches} microbatches"
        yield Foreseen(what, (own["simulated_s"],), (own["simulated_s"] * own["ratio"],))


def summary(runs: Sequence[Foreseen]) -> dict[str, Any]:
    """Each run, the errors of all, and by how much the run predicted best takes longer than the best."""
    rows = [
        {
            "what": one.what,
            "predicted_s": statistics.median(one.predicted_s),
            "measured_s": statistics.median(one.measured_s),
            "error": one.error,
        }
        for one in runs
    ]
    errors = [abs(row["error"]) for row in rows]
    chosen, best = (min(rows, key=lambda row, by=by: row[by]) for by in ("predicted_s", "measured_s"))
    return {
        "runs": rows,
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "chosen": chosen["what"],
        "best": best["what"],
        "chosen_over_best": chosen["measured_s"] / best["measured_s"],
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Predict and run all combinations on two ranks, and the emulated ones on 4 and 8."""
    progress(f"{len(KNOWN) + len(COMBINATIONS)} runs of {NUM_RANKS} ranks, {given.rounds + 1} rounds")
    rounds = run_all(given.rounds)
    found = {f"{NUM_RANKS} ranks": summary([foreseen(one, rounds) for one in COMBINATIONS])}
    times = schedules.parser().parse_args(["--steps", str(given.rounds)])
    for ranks, microbatches in EMULATED_SIZES:
        progress(f"{len(EMULATED_NAMES)} runs of {ranks} emulated devices, {given.rounds + 1} rounds")
        emulation = schedules.emulation(times, ranks, microbatches)
        found[f"{ranks} emulated devices"] = summary(list(_emulated(emulation)))
    return {"predicted": found}


def show(result: dict[str, Any]) -> None:
    """Print the runs as tables, with a sentence below each."""
    for where, found in result["predicted"].items():
        rows = [
            [row["what"], f"{row['predicted_s']:.3f} s", f"{row['measured_s']:.3f} s", f"{row['error']:+.1%}"]
            for row in found["runs"]
        ]
        print(f"{where}:")
        print_table([["run", "predicted", "measured", "error within a round"], *rows])
        print(f"{sentence(found)}\n")


def sentence(found: dict[str, Any]) -> str:
    """A summary's errors, and what choosing by prediction costs."""
    return (
        f"mean error {found['mean_error']:.1%}, worst {found['worst_error']:.1%}; "
        f"{found['chosen']}, predicted to be the fastest, took {found['chosen_over_best'] - 1:.1%} longer than "
        f"{found['best']}, the fastest"
    )


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("plan_here", __doc__, "--rounds 3")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is run")
    return parser


if __name__ == "__main__":
    sys.exit(main("plan_here"))
