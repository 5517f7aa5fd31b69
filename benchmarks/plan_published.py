"""`penstock bench plan`: the planner's predictions beside what was measured, by others and here."""

import argparse
import sys
from typing import Any

from benchmarks import plan_time as timed
from benchmarks.predictions import predict_runs
from benchmarks.published import read_runs
from benchmarks.report import by_group, cells, row_of, summary, summary_cells
from penstock.cli.commands import print_table

WHAT = "the planner: its predictions beside published runs, beside runs here, or the time that plans take"
_DEVICES = [size.devices for size in timed.SIZES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument("--runs", metavar="FILE", help="a table of measured runs, such as measured_runs.csv of docs/")
    parser.add_argument(
        "--here", action="store_true", help="predict steps of two ranks and of emulated devices, and run them"
    )
    parser.add_argument("--rounds", type=int, default=5, help="with --here, how often each is run (default 5)")
    parser.add_argument(
        "--devices", type=int, nargs="+", choices=_DEVICES, default=_DEVICES, help="without --runs, plan for so many"
    )
    parser.add_argument("--effort", type=float, default=1.0, metavar="F", help="of these plans (default 1)")
    parser.add_argument("--source", metavar="TEXT", default="", help="only the runs whose source contains this")
    parser.add_argument(
        "--fit-where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="fit the constants on these rows and predict the others; several values of a column are alternatives "
        "(default: each run by the others of its source and container)",
    )


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Predict the runs of a table; without one, measure how long plans take.

    Raises: ValueError for a file or a column that cannot be read.
    """
    if given.here:
        from benchmarks import foreseen as bench_plan_here

        return {"predicted": bench_plan_here.measure(given.rounds, _progress)}
    if given.runs is None:
        sizes = [size for size in timed.SIZES if size.devices in given.devices]
        return {
            "plans": list(timed.measure(sizes, given.effort, _progress)),
            "seconds_allowed": timed.SECONDS_ALLOWED,
            "bytes_allowed": timed.BYTES_ALLOWED,
        }
    runs, others = read_runs(given.runs)
    if not runs:
        raise ValueError(f"{given.runs} has no run that can be predicted; of the first of them, {others[0][1]}")
    runs = [run for run in runs if given.source.lower() in run.row["source"].lower()]
    if not runs:
        raise ValueError(f"{given.runs} has no run of a source with {given.source!r} that can be predicted")
    predictions = predict_runs(runs, [_pair(text) for text in given.fit_where], _progress)
    groups = by_group(predictions)
    return {
        "runs": [row_of(one) for one in predictions],
        "sources": [summary(group, own) for group, own in groups.items()],
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
    if "predicted" in result:
        from benchmarks import foreseen as bench_plan_here

        for where, found in result["predicted"].items():
            print(f"{where}:")
            print_table(bench_plan_here.cells(found))
            print(f"{bench_plan_here.sentence(found)}\n")
        return
    if "plans" in result:
        print_table(timed.cells(result["plans"]))
        return
    source = None
    for one in result["runs"]:
        if (one["source"], one["where"]) != source:
            source = one["source"], one["where"]
            own = [row for row in result["runs"] if (row["source"], row["where"]) == source]
            constants = sorted({(round(row["compute"], 3), round(1e3 * row["action_s"], 2)) for row in own})
            shares = [share for share, _ in constants]
            actions = [action for _, action in constants]
            print(f"\n{one['source']}, {one['where']}: compute {_range(shares)}, action {_range(actions)} ms")
            print_table(cells(own))
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


def _progress(text: str) -> None:
    print(text, file=sys.stderr)
