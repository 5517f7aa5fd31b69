"""Tables of predictions beside measurements: rows, and each source's errors and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from benchmarks.predictions import Prediction
from penstock.planner.calibrate import spearman

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
        "rank_correlation": spearman(
            [one.run.tokens / one.predicted_s for one in predictions],
            [one.run.tokens / one.run.measured_s for one in predictions],
        ),
        "faster_named": right,
        "pairs_of_schedules": all_pairs,
        "too_big": sum(one.too_big for one in predictions),
    }


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


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows as a table, its head first."""
    head = ["model", "devices", "layout", "precision", "schedule", "measured", "predicted", "error", "memory", ""]
    return [head, *(_cells(row) for row in rows)]


def _cells(row: dict[str, Any]) -> list[str]:
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
