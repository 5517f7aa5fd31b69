"""What fused pairs can hide: who watches the collectives inside stages, and whether there are any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.model import Collectives, observe
from penstock.runtime import Recorder, Stage
from penstock.schedule import Pair

if TYPE_CHECKING:
    from penstock.engine.engine import Engine


def observe_stages(stages: Iterable[Stage], recorder: Recorder) -> None:
    """Let the recorder note every collective that the stages' units launch."""
    for stage in stages:
        for _, module in stage.units:
            observe(module, recorder)


def vain_overlap(engine: Engine, num_microbatches: int) -> str | None:
    """A sentence where overlap is asked for and nothing of any rank's stages can travel meanwhile; else None.

    All ranks call it at one point, and all get the same.
    """
    program = engine.program(num_microbatches)
    fused = any(isinstance(step, Pair) for order in program.schedule.orders for step in order)
    if not (fused and engine.options.pairs.overlap):
        return None
    # A rank's own stages may be dense, and those of another exchange a lot.
    (num_exchanging,) = engine.sum_over_ranks(float(any(map(_exchanges, engine.stages.values()))))
    if num_exchanging:
        return None
    return (
        f"{program.schedule.name} fuses forwards with backwards, so that one computes while what the other exchanges "
        "with its peers travels; here no layer exchanges anything, so overlap gains nothing"
    )


def _exchanges(stage: Stage) -> bool:
    """Whether lanes of the stage are suspended while something travels between ranks."""
    parts = (part for _, module in stage.units for part in module.modules())
    shared = (value for part in parts for value in vars(part).values() if isinstance(value, Collectives))
    return stage.exchanges and any(collectives.size > 1 for collectives in shared)
