"""Programs that hang, and a plain interpreter of programs that finds where: nothing here asks the package's rules."""

import random
from collections.abc import Callable

from penstock.schedule import (
    Action,
    Op,
    Placement,
    Program,
    Schedule,
    ScheduleError,
    Step,
    build,
    from_csv,
    from_text,
    lower,
    parts,
    to_text,
    verify,
)
from penstock.schedule.actions import Hang

LOOKS_FINE = (
    "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1\n"
)
RING = "penstock schedule 1\nname: ring\nplacement: loop\nranks: 3\nstages_per_rank: 2\nmicrobatches: 1\n"
RING += "training: no\nlive_bound: none\nrank 0: 3F0 0F0\nrank 1: 4F0 1F0\nrank 2: 2F0 5F0\n"


def _program(text: str) -> Program:
    plan = from_text(text) if text.startswith("penstock") else from_csv(text)
    return lower(plan) if isinstance(plan, Schedule) else plan


def _edited(name: str, old: str, new: str, **size: int) -> Program:
    text = to_text(build(name, **size))
    assert old in text
    return _program(text.replace(old, new, 1))


def _interleaved() -> Program:
    """Rank 1 receives the gradient of its first stage only behind its last backward."""
    program = lower(build("interleaved", ranks=2, microbatches=4, stages_per_rank=2))
    steps = [step for step in program.ranks[1] if str(step) != "1RECV_B3"]
    at = 1 + max(place for place, step in enumerate(steps) if isinstance(step, Action) and step.op is Op.SEND_B)
    return Program(program.schedule, (program.ranks[0], (*steps[:at], Action(Op.RECV_B, 1, 3), *steps[at:])))


def _without_a_send() -> Program:
    program = lower(build("1f1b", ranks=2, microbatches=3))
    steps = tuple(step for step in program.ranks[1] if str(step) != "1SEND_B1")
    return Program(program.schedule, (program.ranks[0], steps))


#: By name, programs that hang, and their arrows.
HANGS: dict[str, tuple[Callable[[], Program], set[tuple[int, int]]]] = {
    "two ranks": (lambda: _program(LOOKS_FINE), {(0, 1), (1, 0)}),
    "a ring of three": (lambda: _program(RING), {(0, 2), (2, 1), (1, 0)}),
    "a message never sent": (_without_a_send, {(0, 1)}),
    "an action left out": (lambda: _edited("1f1b", " 3B7", "", ranks=4, microbatches=8), {(2, 3)}),
    "after many actions": (
        lambda: _edited("1f1b", "0F31 0B29 0B30", "0B29 0B30 0F31", ranks=3, microbatches=32),
        {(0, 1), (1, 0)},
    ),
    "some merely wait": (lambda: _edited("afab", "0F7 0B0", "0B0 0F7", ranks=4, microbatches=8), {(0, 1), (1, 0)}),
    "interleaved": (_interleaved, {(0, 1), (1, 0)}),
}


def hang_of(program: Program) -> Hang | None:
    """The hang that the proof names; None for a program that is proved, or refused for something else."""
    try:
        verify(program)
    except ScheduleError as error:
        return error.hang
    return None


def awaited_by(placement: Placement, action: Action) -> tuple[Action, int] | None:
    """What an action waits for on another rank, if every send blocks, and the rank; None if nothing."""
    forwards = action.op in (Op.F, Op.SEND_F, Op.RECV_F)
    sends = action.op in (Op.SEND_F, Op.SEND_B)
    if not sends and action.op not in (Op.F, Op.B, Op.I):
        return None
    stage = action.stage + (1 if forwards == sends else -1)
    if not 0 <= stage < placement.num_stages or placement.rank_of(stage) == placement.rank_of(action.stage):
        return None
    op = (Op.RECV_F if sends else Op.SEND_F) if forwards else (Op.RECV_B if sends else Op.SEND_B)
    return Action(op, stage, action.microbatch), placement.rank_of(stage)


def carried_out(program: Program) -> list[tuple[Step, ...]]:
    """Each rank's steps that can be carried out, one at a time, until no rank can go on."""
    at, done = [0] * len(program.ranks), set[Action]()

    def waits(rank: int) -> bool:
        wanted = [awaited_by(program.placement, own) for own in parts(program.ranks[rank][at[rank]])]
        return any(one is not None and one[0] not in done for one in wanted)

    while ready := [rank for rank, steps in enumerate(program.ranks) if at[rank] < len(steps) and not waits(rank)]:
        done.update(parts(program.ranks[ready[0]][at[ready[0]]]))
        at[ready[0]] += 1
    return [steps[:own] for steps, own in zip(program.ranks, at, strict=True)]


def waiting(program: Program) -> dict[int, tuple[Action, Action, int]]:
    """Each rank that cannot go on: the action in which it waits, what it waits for, and of which rank."""
    done = carried_out(program)
    given = {action for steps in done for step in steps for action in parts(step)}
    found = {}
    for rank, steps in enumerate(program.ranks):
        for action in parts(steps[len(done[rank])]) if len(done[rank]) < len(steps) else ():
            wanted = awaited_by(program.placement, action)
            if wanted is not None and wanted[0] not in given:
                found.setdefault(rank, (action, *wanted))
    return found


def late_receives(program: Program, chance: random.Random) -> Program:
    """The program with some receives later, each still ahead of the action that uses it."""
    ranks = []
    for own in program.ranks:
        steps = list(own)
        for receive in [step for step in own if isinstance(step, Action) and step.op in (Op.RECV_F, Op.RECV_B)]:
            if chance.random() < 0.5:
                continue
            ops = (Op.F,) if receive.op is Op.RECV_F else (Op.B, Op.I)
            user = next(
                place
                for place, step in enumerate(steps)
                if any(
                    a.op in ops and a.stage == receive.stage and a.microbatch == receive.microbatch for a in parts(step)
                )
            )
            at = steps.index(receive)
            steps.insert(chance.randint(at, user), receive)
            steps.pop(at)
        ranks.append(tuple(steps))
    return Program(program.schedule, tuple(ranks))
