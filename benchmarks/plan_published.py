"""Errors of the planner's predictions of published runs, each by constants fitted on the others of its source.

A row of the table is a run that others measured; docs/benchmarks/measured_runs.md describes its columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import correlation
from typing import Any

from benchmarks.common import main, new_parser, progress
from benchmarks.published import PublishedRun, TimedRun, read_runs
from penstock.cli.options import Parser
from penstock.cli.output import print_table
from penstock.planner.calibrate import LinearStep, fit
from penstock.planner.cluster import unknown
from penstock.planner.times import Constants

RUNS = Path(__file__).with_name("measured_runs.csv")
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


# ---- Tables of predictions beside measurements


# Measured steps that differ by less are not taken to differ: runs are published with two or three digits.
_SAME = 0.005


def row_of(prediction: Prediction) -> dict[str, Any]:
    """One run with its prediction."""
    row, constants = prediction.run.row, prediction.constants
    names = ("source", "where", "model", "hardware", "gpus", "precision", "schedule", "tp", "pp", "vp", "cp", "ep")
    return {
        **{name: row.get(name, "") for name in names},
        "measured_s": prediction.run.measured_s,
        "predicted_s": prediction.predicted_s,
        "error": prediction.error,
        "fitted": prediction.fitted,
        "too_big": prediction.too_big,
        "peak_bytes": prediction.peak_bytes,
        "memory_error": prediction.memory_error,
        "compute": constants.compute,
        "action_s": constants.action_s,
        "at_bounds": list(constants.at_bounds),
    }


def by_group(predictions: Iterable[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    """The predictions of each source and container."""
    found: dict[tuple[str, str], list[Prediction]] = {}
    for one in predictions:
        found.setdefault(one.run.group, []).append(one)
    return found


def summary(group: tuple[str, str], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The errors of a group's predicted runs, and the ranks of all of them by tokens a second and device."""
    errors = [abs(one.error) for one in predictions if not one.fitted]
    right, all_pairs = _faster(predictions)
    return {
        "source": group[0],
        "where": group[1],
        "runs": len(predictions),
        "predicted": len(errors),
        "mean_error": sum(errors) / len(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "rank_correlation": rank_correlation(
            [one.run.tokens / one.predicted_s for one in predictions],
            [one.run.tokens / one.run.measured_s for one in predictions],
        ),
        "faster_named": right,
        "pairs_of_schedules": all_pairs,
        "too_big": sum(one.too_big for one in predictions),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's: the correlation of two lists' ranks, ties at their mean rank; None if one has a single rank."""
    a, b = ([sum((other < value) + (other <= value) for other in each) for value in each] for each in (first, second))
    return correlation(a, b) if len({*a}) > 1 and len({*b}) > 1 else None


def _faster(predictions: Sequence[Prediction]) -> tuple[int, int]:
    """Count the pairs of schedules, of the same model, devices and microbatches, whose faster one is named; and all."""
    right = pairs = 0
    same = ("model", "gpus", "num_microbatches", "micro_batch", "tp", "pp", "precision")
    for one, other in combinations(predictions, 2):
        if one.run.row["schedule"] == other.run.row["schedule"] or any(
            one.run.row[name] != other.run.row[name] for name in same
        ):
            continue
        if abs(one.run.measured_s / other.run.measured_s - 1) < _SAME:
            continue
        pairs += 1
        right += (one.predicted_s < other.predicted_s) == (one.run.measured_s < other.run.measured_s)
    return right, pairs


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows as a table, its head first."""
    head = ["model", "devices", "layout", "precision", "schedule", "measured", "predicted", "error", "memory", ""]
    return [head, *(_row_cells(row) for row in rows)]


def _row_cells(row: dict[str, Any]) -> list[str]:
    layout = " ".join(f"{axis}{row[axis]}" for axis in ("tp", "pp", "vp", "cp", "ep") if row[axis] not in ("", "1"))
    remark = "fitted" if row["fitted"] else "called too big" if row["too_big"] else ""
    return [
        row["model"],
        f"{row['gpus']} {row['hardware'].partition(' ')[0].rstrip(',')}",
        layout or "-",
        row["precision"] or "-",
        row["schedule"].partition(" (")[0] or "-",
        f"{row['measured_s']:.3f} s",
        f"{row['predicted_s']:.3f} s",
        f"{row['error']:+.1%}",
        "-" if row["memory_error"] is None else f"{row['memory_error']:+.1%}",
        remark,
    ]


def summary_cells(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Summaries as a table, its head first."""
    head = ["source and container", "runs", "mean error", "worst", "rank", "faster of two schedules", "called too big"]
    rows = []
    for one in summaries:
        rank = one["rank_correlation"]
        rows.append(
            [
                f"{one['source'].partition('@')[0]} {one['where']}".strip(),
                str(one["runs"]),
                "-" if one["mean_error"] is None else f"{one['mean_error']:.1%}",
                "-" if one["worst_error"] is None else f"{one['worst_error']:.1%}",
                "-" if rank is None else f"{rank:.3f}",
                f"{one['faster_named']} of {one['pairs_of_schedules']}" if one["pairs_of_schedules"] else "-",
                str(one["too_big"]),
            ]
        )
    return [head, *rows]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Predict the runs of a table.

    Raises: ValueError for a file or a column that cannot be read.
    """
    runs, others = read_runs(given.runs)
    if not runs:
        raise ValueError(f"{given.runs} has no run that can be predicted; of the first of them, {others[0][1]}")
    runs = [run for run in runs if given.source.lower() in run.row["source"].lower()]
    if not runs:
        raise ValueError(f"{given.runs} has no run of a source with {given.source!r} that can be predicted")
    predictions = predict_runs(runs, [_pair(text) for text in given.fit_where], progress)
    return {
        "runs": [row_of(one) for one in predictions],
        "sources": [summary(group, own) for group, own in by_group(predictions).items()],
        "not_predicted": [
            {"source": row["source"], "model": row["model"], "reason": reason}
            for row, reason in others
            if given.source.lower() in row["source"].lower()
        ],
    }


def _pair(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--fit-where takes COLUMN=VALUE, such as schedule=1F1B, not {text!r}")
    return column, value


def show(result: dict[str, Any]) -> None:
    """Print the result as tables."""
    source = None
    for one in result["runs"]:
        if (one["source"], one["where"]) != source:
            source = one["source"], one["where"]
            own = [row for row in result["runs"] if (row["source"], row["where"]) == source]
            constants = sorted({(round(row["compute"], 3), round(1e3 * row["action_s"], 2)) for row in own})
            shares = [share for share, _ in constants]
            actions = [action for _, action in constants]
            print(f"\n{one['source']}, {one['where']}: compute {_range(shares)}, action {_range(actions)} ms")
            for sentence in dict.fromkeys(sentence for row in own for sentence in row["at_bounds"]):
                print(f"{sum(sentence in row['at_bounds'] for row in own)} of {len(own)}: {sentence}")
            print_table(_cells(own))
    print()
    print_table(summary_cells(result["sources"]))
    reasons: dict[str, int] = {}
    for other in result["not_predicted"]:
        reasons[other["reason"]] = reasons.get(other["reason"], 0) + 1
    for reason, number in sorted(reasons.items(), key=lambda pair: -pair[1]):
        print(f"{number} not predicted: {reason}")


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("plan_published", __doc__, "--source MegaScale", "--fit-where schedule=1F1B")
    parser.add_argument("--runs", metavar="FILE", default=RUNS, type=Path, help="a table of measured runs")
    parser.add_argument("--source", metavar="TEXT", default="", help="only the runs whose source contains this")
    parser.add_argument(
        "--fit-where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="fit the constants on these rows and predict the others; several values of a column are alternatives",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main("plan_published"))
