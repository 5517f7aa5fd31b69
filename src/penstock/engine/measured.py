"""The measured timeline of a step, gathered from the ranks of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.parallel.exchange import gather_json
from penstock.schedule import Action, Event, Op, Pair, Step, Timeline

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

_SHOWN = frozenset({Op.F, Op.B, Op.I, Op.W, Op.REDUCE_GRAD, Op.STEP})


def gather_events(engine: Engine) -> Timeline | None:
    """The last step of pipeline 0 as a timeline that begins with its first action; None on all ranks but 0."""
    own = [
        (_pack(event.action), event.start, event.end)
        for event in engine.recorder.events()
        if isinstance(event.action, Pair) or event.action.op in _SHOWN
    ]
    by_rank = gather_json(own, engine.grid.pp_control)
    if engine.grid.rank != 0:
        return None
    first = min(start for rank in by_rank for _, start, _ in rank)
    events = [[Event(_unpack(a), start - first, end - first) for a, start, end in rank] for rank in by_rank]
    return Timeline.from_events(
        events,
        stages_per_rank=engine.placement.stages_per_rank,
        title=f"{engine.options.schedule}, {engine.layout.pp} ranks, measured in step {engine.step}",
    )


def _pack(step: Step) -> list[int]:
    actions = (step.forward, step.backward) if isinstance(step, Pair) else (step,)
    return [value for a in actions for value in (int(a.op), a.stage, a.microbatch)]


def _unpack(values: list[int]) -> Step:
    actions = [Action(Op(values[i]), values[i + 1], values[i + 2]) for i in range(0, len(values), 3)]
    return Pair(*actions) if len(actions) == 2 else actions[0]
