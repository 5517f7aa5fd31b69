"""The passes that turn a schedule into a program.

    early_gradients   schedule -> schedule   split each B whose gradient leaves its rank, to send it earlier
    add_transfers     schedule -> steps      add the sends, and receives posted ahead of need (`transfers.py`)
    add_reductions    steps -> steps         add each stage's gradient reduction
    add_step          steps -> steps         add the optimizer step

`lower` runs the last three; the first is the caller's choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace

from penstock.schedule.actions import (
    TRANSFERS,
    Action,
    Direction,
    Op,
    Program,
    Schedule,
    Step,
    check_count,
    parts,
)
from penstock.schedule.rules import Wire
from penstock.schedule.transfers import add_transfers


def lower(schedule: Schedule, *, receives_ahead: int = 2, shared_channels: bool = False) -> Program:
    """Turn a schedule into a program that carries it out, without changing the schedule.

    A send comes right after the step that makes its tensor, so it may leave while that step goes on. The receives on a
    channel are posted in the order of the sends: up to `receives_ahead` of them at the start, then one more after each
    action that used one up. That receive follows the action's own sends, since other ranks wait for those, unless a
    send itself has to wait. If `receives_ahead` is too few for blocking sends, a channel gets more. A gradient is
    reduced right after the last action that writes to it; the optimizer step comes last.

    With `shared_channels`, a rank receives activations and gradients from another in the one order in which they are
    sent. A runtime with one channel for both, such as torch's, needs this. A runtime with two channels can run such a
    program too, but posts some receives later.

    >>> from penstock.schedule import build
    >>> print(*lower(build("1f1b", ranks=2, microbatches=1)).ranks[0])
    0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD STEP

    Raises: ValueError for `receives_ahead` below one, ScheduleError for an action the placement does not have.
    """
    check_count("receives_ahead", receives_ahead)
    ranks = add_transfers(schedule, receives_ahead, shared_channels)
    if schedule.training:
        stages_of = schedule.placement.stages_of
        ranks = [add_step(add_reductions(steps, stages_of(rank))) for rank, steps in enumerate(ranks)]
    return Program(schedule, tuple(map(tuple, ranks)))


def early_gradients(schedule: Schedule) -> Schedule:
    """Split every `B` whose gradient goes to another rank into an `I` directly followed by its `W`.

    The order of microbatches and the memory stay the same: `B` computes both parts anyway, and only the message moves
    from after the second part to between the two. Earlier ranks wait less: at the end of 1F1B, by p-1 times the time
    of a `W`. Fused pairs stay whole, since the runtime sends from inside them.

    >>> from penstock.schedule import build
    >>> print(*early_gradients(build("1f1b", ranks=2, microbatches=1)).orders[1])
    1F0 1I0 1W0
    """
    placement = schedule.placement
    # Found once for all ranks: with hundreds of them, anything else would take minutes.
    leaving = {s for s in range(placement.num_stages) if Wire.of(placement, s, Direction.BACKWARD).leaving}
    orders = tuple(tuple(_split(order, leaving)) for order in schedule.orders)
    return replace(schedule, orders=orders)


def _split(order: Sequence[Step], leaving: Set[int]) -> Iterator[Step]:
    """The order with each `B` of these stages in two parts."""
    for step in order:
        if isinstance(step, Action) and step.op is Op.B and step.stage in leaving:
            yield Action(Op.I, step.stage, step.microbatch)
            yield Action(Op.W, step.stage, step.microbatch)
        else:
            yield step


def add_reductions(steps: Sequence[Step], stages: Iterable[int]) -> list[Step]:
    """Add each stage's reduction after the last action that writes its gradients and the transfers that follow it."""
    writers = ((at, a) for at, step in enumerate(steps) for a in parts(step) if a.op in (Op.B, Op.W))
    last_write = {action.stage: at for at, action in writers}
    reduced_at: dict[int, list[int]] = defaultdict(list)
    for stage in stages:
        at = last_write.get(stage, len(steps) - 1)
        while at + 1 < len(steps) and parts(steps[at + 1])[0].op in TRANSFERS:
            at += 1
        reduced_at[at].append(stage)
    done: list[Step] = []
    for at, step in enumerate(steps):
        done.append(step)
        done += [Action(Op.REDUCE_GRAD, stage) for stage in reduced_at[at]] if at in reduced_at else []
    return done


def add_step(steps: Sequence[Step]) -> list[Step]:
    """Add the optimizer step at the end."""
    return [*steps, Action(Op.STEP)]
