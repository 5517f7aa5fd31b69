"""The needs of a layout, learned by running the engine's own code without data: the planner's one way to the engine.

`rehearse` alone needs torch, and imports it when it is called.
"""

from pathlib import Path

from penstock.schedule.rehearsal import (
    ActionCost,
    CollectiveTraffic,
    MemoryKind,
    MemoryPoint,
    MessageTraffic,
    Rehearsal,
    RehearsalError,
    UnitCost,
)
from penstock.settings import RunConfig
from penstock.settings.arguments import checked

__all__ = [
    "ActionCost",
    "CollectiveTraffic",
    "MemoryKind",
    "MemoryPoint",
    "MessageTraffic",
    "Rehearsal",
    "RehearsalError",
    "UnitCost",
    "rehearse",
]


@checked
def rehearse(config: RunConfig | str | Path, rank: int = 0, device: str | None = None) -> Rehearsal:
    """One rank's training step under a run's settings, read from a TOML file or given.

    device: "cpu" or "cuda"; left out, that of the settings, of which "auto" is "cuda".

    Raises:
        ValueError: the settings cannot go together, or the layout has no such rank.
        RehearsalError: the step would fail on devices; names the action.
    """
    from penstock.engine.rehearsal.step import rehearse_run

    return rehearse_run(config, rank, device)
