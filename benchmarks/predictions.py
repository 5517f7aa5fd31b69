"""Predictions of published runs, with constants fitted on other runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.published import PublishedRun, TimedRun
from penstock.planner.calibrate import LinearStep, fit
from penstock.planner.cluster import unknown
from penstock.planner.times import Constants

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prediction:
    """A run with what was predicted for it, by which constants."""

    run: PublishedRun
    predicted_s: float
    constants: Constants
    #: True if the constants were fitted on this run too
    fitted: bool
    #: bytes of the fullest rank
    peak_bytes: float
    too_big: bool

    @property
    def error(self) -> float:
        """The relative error of the predicted step."""
        return self.predicted_s / self.run.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the predicted memory; None if none is published."""
        measured = self.run.row.get("memory_gib")
        return self.peak_bytes / (float(measured) * 2**30) - 1 if measured else None


def predict_runs(
    runs: Sequence[PublishedRun], fit_where: Sequence[tuple[str, str]] = (), progress: Progress = lambda text: None
) -> list[Prediction]:
    """Predict runs with constants fitted on others.

    `fit_where`: the rows that constants are fitted on, as (column, value); several values of a column are
    alternatives. The constants of a source are fitted on its rows among them, and on all of them where it has none.
    Without it, each run is predicted with constants fitted on the other runs of its source and container.

    Raises: ValueError for a column that the table does not have, or values that no row has.
    """
    chosen = _chosen(runs, fit_where)
    start = {id(run): Constants(compute=1.0) if isinstance(run, TimedRun) else Constants() for run in runs}
    linear: dict[int, LinearStep] = {}
    for number, run in enumerate(runs, start=1):
        if not fit_where:
            linear[id(run)] = LinearStep.around(run.predict, start[id(run)], run.measured_s)
        progress(f"{number}/{len(runs)} {run.row['source'][:40]}: {run.row['model']}")
    found, fitted = [], {}
    for run in runs:
        others = list(_fitting(run, runs, chosen, bool(fit_where)))
        if fit_where:
            key = (type(run), *map(id, others))
            constants = fitted[key] = fitted.get(key) or _fit_again([*others], start[id(run)])
        else:
            constants = fit([linear[id(other)] for other in others], start[id(run)])
        memory = run.peak_bytes()
        too_big = memory > run.memory_bytes()
        found.append(Prediction(run, run.predict(constants), constants, id(run) in chosen, memory, too_big))
    return found


def _fit_again(runs: Sequence[PublishedRun], constants: Constants) -> Constants:
    """Fit, and take the slopes anew where the last ones led: a step is a longest path, which the constants move."""
    for _ in range(3):
        constants = fit([LinearStep.around(run.predict, constants, run.measured_s) for run in runs], constants)
    return constants


def _fitting(run: PublishedRun, runs: Sequence[PublishedRun], chosen: set[int], given: bool) -> Iterator[PublishedRun]:
    """The runs that a run's constants are fitted on."""
    if not given:
        yield from (other for other in runs if other is not run and other.constants_of == run.constants_of)
        return
    same = [other for other in runs if id(other) in chosen and other.constants_of == run.constants_of]
    kind = type(run)
    yield from same or (other for other in runs if id(other) in chosen and type(other) is kind)


def _chosen(runs: Sequence[PublishedRun], fit_where: Sequence[tuple[str, str]]) -> set[int]:
    wanted: dict[str, set[str]] = {}
    for column, value in fit_where:
        if runs and column not in runs[0].row:
            raise unknown(column, runs[0].row, "column")
        wanted.setdefault(column, set()).add(value)
    chosen = {id(run) for run in runs if wanted and all(run.row[name] in values for name, values in wanted.items())}
    if wanted and not chosen:
        text = ", ".join(f"{name} = {' or '.join(sorted(values))}" for name, values in wanted.items())
        raise ValueError(f"no run that can be predicted has {text}")
    return chosen
