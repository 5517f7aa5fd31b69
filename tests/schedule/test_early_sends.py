"""Early sends: what leaves while its step goes on is in the program, and never overtakes another message."""

from dataclasses import replace

import pytest

from penstock import schedule
from penstock.schedule import Action, Op, Pair, Program, ScheduleError
from penstock.schedule.actions import SENDS, TRANSFERS, parts
from penstock.schedule.rules import early_sends

NAMES = ("1f1b", "interleaved", "zb-h1", "combined-1f1b", "combined-interleaved", "dualpipe", "dualpipe-v")


def lowered(name: str, receives_ahead: int = 2) -> Program:
    return schedule.lower(schedule.build(name, ranks=4, microbatches=8), receives_ahead=receives_ahead)


@pytest.mark.parametrize("receives_ahead", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_sends_of_pairs_and_full_backwards_leave_early_and_no_others(name: str, receives_ahead: int) -> None:
    program = lowered(name, receives_ahead)
    num_early = 0
    for steps, early in zip(program.ranks, program.early_sends, strict=True):
        made: set[tuple[object, int, int]] = set()
        for step in steps:
            if isinstance(step, Action) and step.op in SENDS:
                expected = (step.op.direction, step.stage, step.microbatch) in made
                assert (step in early) == expected
                num_early += expected
            elif isinstance(step, Pair) or step.op not in TRANSFERS:
                goes_on = isinstance(step, Pair) or step.op is Op.B
                made = {(a.op.direction, a.stage, a.microbatch) for a in parts(step)} if goes_on else set()
    assert (num_early > 0) == (name != "zb-h1"), "there every backward is split"
    schedule.verify(program)


def test_a_send_waits_for_its_place_behind_another_one_in_its_direction() -> None:
    pair = Pair(Action(Op.F, 0, 1), Action(Op.B, 0, 0))
    first, second, gradient = Action(Op.SEND_F, 0, 0), Action(Op.SEND_F, 0, 1), Action(Op.SEND_B, 0, 0)
    assert early_sends([Action(Op.F, 0, 0), pair, first, second, gradient]) == {gradient}
    assert early_sends([Action(Op.F, 0, 0), first, pair, second, gradient]) == {second, gradient}


@pytest.mark.parametrize("name", NAMES)
def test_reading_a_program_finds_the_same_early_sends(name: str) -> None:
    program = lowered(name)
    assert schedule.from_text(schedule.to_text(program)) == program


def test_the_proof_refuses_a_send_that_would_leave_before_its_tensor_is_there() -> None:
    program = lowered("combined-1f1b")
    late = next(step for step in program.ranks[0] if isinstance(step, Action) and step.op is Op.SEND_F)
    assert late not in program.early_sends[0]
    with pytest.raises(ScheduleError, match=f"rank 0: {late} is marked to leave early"):
        schedule.verify(replace(program, early_sends=(frozenset({late}), *program.early_sends[1:])))
