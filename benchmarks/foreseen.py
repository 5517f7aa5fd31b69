"""`penstock bench plan --here`: steps on this machine, predicted before they are run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.from_units import UnitStep, fit_constants
from benchmarks.plan_here import (
    COMBINATIONS,
    EMULATED_NAMES,
    EMULATED_SIZES,
    KNOWN,
    NUM_RANKS,
    Combination,
    Round,
    run,
)
from benchmarks.schedules import Emulation, compare
from penstock.planner.times import Order


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


def measure(num_rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Predict and run all combinations on two ranks, and the emulated ones on 4 and 8, `num_rounds` times each."""
    progress(f"{len(KNOWN) + len(COMBINATIONS)} runs of {NUM_RANKS} ranks, {num_rounds + 1} rounds")
    rounds = run(num_rounds)
    found = {f"{NUM_RANKS} ranks": summary([foreseen(one, rounds) for one in COMBINATIONS])}
    for ranks, microbatches in EMULATED_SIZES:
        progress(f"{len(EMULATED_NAMES)} runs of {ranks} emulated devices, {num_rounds + 1} rounds")
        emulation = Emulation(ranks, microbatches, num_steps=num_rounds)
        found[f"{ranks} emulated devices"] = summary(list(_emulated(emulation)))
    return found


def foreseen(combination: Combination, rounds: Sequence[Round]) -> Foreseen:
    """A combination's steps, predicted from what each round measured before it."""
    predicted = []
    for one in rounds:
        known = [(_step(run, one), one.steps[run].step_s - one.steps[run].rest_s) for run in KNOWN]
        rest_s = statistics.median(one.steps[run].rest_s for run in KNOWN)
        predicted.append(_step(combination, one).seconds(fit_constants(known)) + rest_s)
    return Foreseen(str(combination), tuple(predicted), tuple(one.steps[combination].step_s for one in rounds))


def _step(combination: Combination, round_: Round) -> UnitStep:
    """A combination's step, in the order that the engine follows, by the units' times of a round."""
    number = combination.num_microbatches
    order = Order(combination.name, NUM_RANKS, number, combination.stages_per_rank, early_gradients=True)
    return UnitStep(order, combination.cut, round_.units[number])


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
    return [["run", "predicted", "measured", "error within a round"], *rows]


def sentence(found: dict[str, Any]) -> str:
    """A summary's errors, and what choosing by prediction costs."""
    return (
        f"mean error {found['mean_error']:.1%}, worst {found['worst_error']:.1%}; "
        f"{found['chosen']}, predicted to be the fastest, took {found['chosen_over_best'] - 1:.1%} longer than "
        f"{found['best']}, the fastest"
    )
