"""Let gradients leave as soon as they are there: what a rank owes its neighbour comes before what it owes itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.schedule.actions import Action, Op, Placement, Schedule, Step


def early_gradients(schedule: Schedule) -> Schedule:
    """The schedule with every `B` whose gradient goes to another rank as an `I` with its `W` right behind.

    The order of microbatches stays and so does what is alive between actions: `B` computes both parts anyhow, and only
    the message moves from behind the second to between the two. The ranks before have less to wait for: at the end of
    1F1B, p-1 times the time of a `W`. Fused pairs stay whole (the runtime sends from inside them), and so does a `B`
    whose gradient stays on its rank or is nobody's input.
    """
    orders = tuple(tuple(_opened(order, schedule.placement)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def _opened(order: Sequence[Step], placement: Placement) -> Iterator[Step]:
    for step in order:
        if isinstance(step, Action) and step.op is Op.B and _leaves(step.stage, placement):
            yield Action(Op.I, step.stage, step.microbatch)
            yield Action(Op.W, step.stage, step.microbatch)
        else:
            yield step


def _leaves(stage: int, placement: Placement) -> bool:
    before = placement.previous(stage)
    return before is not None and placement.rank_of(before) != placement.rank_of(stage)
