"""Early sends: what leaves while its step goes on is in the program, and never overtakes another message."""

import pytest

from penstock import schedule
from penstock.schedule import Action, Op, Pair, Program
from penstock.schedule.actions import SENDS, TRANSFERS, parts
from penstock.schedule.rules import early_sends

NAMES = ("1f1b", "interleaved", "zb-h1", "combined-1f1b", "combined-interleaved", "dualpipe", "dualpipe-v")
_SENDS = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}


def lowered(name: str, receives_ahead: int = 2) -> Program:
    return schedule.lower(schedule.build(name, ranks=4, microbatches=8), receives_ahead=receives_ahead)


@pytest.mark.parametrize("receives_ahead", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_sends_of_pairs_and_full_backwards_leave_early_and_no_others(name: str, receives_ahead: int) -> None:
    program = lowered(name, receives_ahead)
    num_early = 0
    for steps in program.ranks:
        early = early_sends(steps)
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
def test_early_sends_keep_the_order_of_every_channel(name: str) -> None:
    for steps in lowered(name, receives_ahead=1).ranks:
        early, leaving = early_sends(steps), []
        for step in steps:
            made = parts(step) if isinstance(step, Pair) or step.op not in TRANSFERS else ()
            results = [Action(_SENDS[a.op], a.stage, a.microbatch) for a in made if a.op in _SENDS]
            leaving += [send for send in results if send in early]
            leaving += [step] if isinstance(step, Action) and step.op in SENDS and step not in early else []
        for op in SENDS:
            listed = [step for step in steps if isinstance(step, Action) and step.op is op]
            assert [send for send in leaving if send.op is op] == listed
