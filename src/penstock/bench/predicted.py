"""The planner held to this machine: steps of two ranks, and of emulated devices, predicted before they are run.

In each round the model's units are timed first, on all ranks at once, and a few known runs, to which the planner's two
constants are fitted. The steps of all others follow, and only then are those run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from penstock import schedule
from penstock.bench.emulated import Emulation, compare
from penstock.bench.ranks import Turn, in_turns
from penstock.bench.training import NUM_RANKS, RATE, Training
from penstock.data import MicroBatchSpec
from penstock.engine import Engine, EngineOptions
from penstock.engine.timed_cut import UnitTimes, times_here, unit_costs
from penstock.planner.fit import LinearStep, fit
from penstock.planner.simulation import Order, simulate_step
from penstock.planner.times import Constants
from penstock.schedule.actions import COMPUTE
from penstock.settings import Layout, LearningRate, OptimizerConfig, ScheduleConfig

MODEL = Training(num_layers=8, hidden_size=256, intermediate_size=704, vocab_size=2048, sequence_tokens=128)
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
    def order(self) -> Order:
        """The order that the engine follows."""
        return Order(self.name, NUM_RANKS, self.num_microbatches, self.stages_per_rank, early_gradients=True)

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
"""The runs to which the constants are fitted: few long actions, many, and many short ones."""

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


@dataclass(frozen=True)
class KnownRun:
    """A run that constants are fitted to: its step, and the part of it in which no microbatch is computed."""

    combination: Combination
    step_s: float
    rest_s: float


def predict(combination: Combination, times: Sequence[UnitTimes], constants: Constants) -> float:
    """The seconds in which a step computes its microbatches, by the units' times on microbatches of its size."""
    cut = [range(first, end) for first, end in pairwise(accumulate(combination.cut, initial=0))]
    costs, slower = unit_costs(times), 1 / constants.compute
    alike = {
        name: [slower * own for own in getattr(costs, name)]
        for name in ("forward", "backward_input", "backward_weight")
    }
    of_stages = schedule.costs_of_cut(replace(costs, **alike), cut)
    return simulate_step(combination.order, replace(of_stages, action=constants.action_s)).makespan


def fit_constants(known: Sequence[KnownRun], times: dict[int, list[UnitTimes]]) -> Constants:
    """The speed of units in a run as a share of that which they have alone, and an action's time besides.

    times: the units' times by the number of microbatches.
    """
    constants = Constants(compute=0.95, action_s=0.0)
    for _ in range(2):
        rows = [
            LinearStep.around(
                lambda own, run=run: predict(run.combination, times[run.combination.num_microbatches], own),
                constants,
                run.step_s - run.rest_s,
            )
            for run in known
        ]
        constants = fit(rows, constants)
    return constants


def measure(num_rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Predict and run all combinations on two ranks, and the emulated ones on 4 and 8, `num_rounds` times each."""
    progress(f"{len(KNOWN) + len(COMBINATIONS)} runs of two ranks, {num_rounds + 1} rounds")
    found = {f"{NUM_RANKS} ranks": summary(list(_here(num_rounds)))}
    for ranks, microbatches in EMULATED_SIZES:
        progress(f"{len(EMULATED_NAMES)} runs of {ranks} emulated devices")
        emulation = Emulation(ranks, microbatches, num_steps=num_rounds)
        found[f"{ranks} emulated devices"] = summary(list(_emulated(emulation)))
    return found


def _here(num_rounds: int) -> Iterator[Foreseen]:
    sides = {str(one): one for one in (*KNOWN, *COMBINATIONS)}
    found = in_turns([_UNITS, *sides], NUM_RANKS, _prepare, sides, num_rounds=num_rounds)
    predicted: dict[str, list[float]] = {str(one): [] for one in COMBINATIONS}
    for i in range(num_rounds):
        times = _mean_times([of_rank[i] for of_rank in found[_UNITS]])
        known = [
            KnownRun(one, *map(max, zip(*(of_rank[i] for of_rank in found[str(one)]), strict=True))) for one in KNOWN
        ]
        constants = fit_constants(known, times)
        rest_s = statistics.median(run.rest_s for run in known)
        for one in COMBINATIONS:
            predicted[str(one)].append(predict(one, times[one.num_microbatches], constants) + rest_s)
    for what, steps in predicted.items():
        measured = tuple(max(step_s for step_s, _ in ranks) for ranks in zip(*found[what], strict=True))
        yield Foreseen(what, tuple(steps), measured)


def _mean_times(of_ranks: Sequence[dict[int, list[tuple[float, ...]]]]) -> dict[int, list[UnitTimes]]:
    """The units' times by number of microbatches, the mean of the ranks'."""
    return {
        number: [
            UnitTimes(*(statistics.mean(values) for values in zip(*unit, strict=True)))
            for unit in zip(*(own[number] for own in of_ranks), strict=True)
        ]
        for number in of_ranks[0]
    }


def _prepare(side: str, rank: int, sides: dict[str, Combination]) -> Turn:
    return _units if side == _UNITS else _step(sides[side])


def _units() -> dict[int, list[tuple[float, ...]]]:
    """The units' times by number of microbatches, measured while all ranks compute."""
    options, device = EngineOptions(device="cpu"), torch.device("cpu")
    found = {}
    for combination in (*KNOWN, *COMBINATIONS):
        if combination.num_microbatches not in found:
            own = combination.training
            times = times_here(own.units(), own.hidden_size, own.lengths, options, device)
            found[combination.num_microbatches] = [astuple(one) for one in times]
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


def _computing_s(timeline: schedule.Timeline) -> float:
    """Seconds from a step's first action to the last of its microbatches."""
    steps = (event for events in timeline.events for event in events)
    return max(event.end for event in steps if schedule.parts(event.action)[0].op in COMPUTE) / 1e3


def _emulated(emulation: Emulation) -> Iterator[Foreseen]:
    for row in compare(EMULATED_NAMES, [emulation], against_torch=False):
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


def cells(found: dict[str, Any]) -> list[list[str]]:
    """The runs of a summary as a table, its head first."""
    rows = [
        [row["what"], f"{row['predicted_s']:.3f} s", f"{row['measured_s']:.3f} s", f"{row['error']:+.1%}"]
        for row in found["runs"]
    ]
    return [["run", "predicted", "measured", "error"], *rows]


def sentence(found: dict[str, Any]) -> str:
    """A summary's errors, and what choosing by prediction costs."""
    return (
        f"mean error {found['mean_error']:.1%}, worst {found['worst_error']:.1%}; "
        f"{found['chosen']}, predicted to be the fastest, took {found['chosen_over_best'] - 1:.1%} longer than "
        f"{found['best']}, the fastest"
    )
