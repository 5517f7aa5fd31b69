"""A planned layout as settings of a run, which `penstock train` takes."""

from __future__ import annotations

from typing import Any

from penstock.planner.estimate import Candidate
from penstock.planner.model_costs import RecomputedPart


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """The settings, by their dotted names, with which a run trains in this layout and order."""
    layout = candidate.layout
    found: dict[str, Any] = {f"parallel.{axis}": size for axis, size in layout.sizes.items()}
    found |= {
        "parallel.ep": layout.ep,
        "parallel.order": layout.order,
        "schedule.name": candidate.schedule,
        "train.num_microbatches": candidate.num_microbatches,
        "train.recompute": "full" if candidate.recompute is RecomputedPart.FULL else "none",
        "optimizer.zero": candidate.zero > 0,
    }
    if layout.pp > 1 and candidate.cut is not None:
        found["schedule.cut"] = list(candidate.cut)
    if candidate.stages_per_rank > 1:
        found["schedule.stages_per_rank"] = candidate.stages_per_rank
    live = dict(candidate.options).get("max_live_microbatches")
    if live is not None:
        found["schedule.max_live_microbatches"] = live
    return found
