"""The hang that a proof names is the one that a plain interpreter of the program runs into."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import Action, Op, Program, build, lower, parts, simulate
from tests.schedule.hangs import HANGS, carried_out, hang_of, late_receives, waiting
from tests.schedule.random_schedules import schedules


def assert_hangs(program: Program) -> None:
    hang = hang_of(program)
    assert hang is not None
    assert list(hang.done.ranks) == carried_out(program)
    stuck = waiting(program)
    assert {rank: (*wait, hang.awaited(rank)) for rank, wait in hang.waits.items()} == stuck
    # Each arrow is a wait; together they close, or end where the rank has no such action.
    assert hang.arrows and all(stuck[rank][2] == awaited for rank, awaited in hang.arrows)
    if len(hang.arrows) > 1:
        assert [awaited for _, awaited in hang.arrows] == [rank for rank, _ in (*hang.arrows[1:], hang.arrows[0])]
    else:
        rank, awaited = next(iter(hang.arrows))
        steps = program.ranks[awaited]
        assert stuck[rank][1] not in [action for step in steps for action in parts(step)]
    for rank, awaited in hang.arrows:
        action, transfer, _ = stuck[rank]
        assert f"rank {rank} at {action} waits" in hang.sentence and f"rank {awaited}" in hang.sentence
        assert str(transfer) in hang.sentence


@pytest.mark.shows(192)
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_where_a_plain_interpreter_stands_still(name: str):
    program, arrows = HANGS[name][0](), HANGS[name][1]
    assert_hangs(program)
    hang = hang_of(program)
    assert hang is not None and set(hang.arrows) == arrows
    timeline = simulate(hang)
    drawn = [[event.action for event in events] for events in timeline.events]
    computed = [
        [step for step in steps if parts(step)[0].op not in (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)]
        for steps in carried_out(program)
    ]
    assert drawn == computed and timeline.hang is hang


@pytest.mark.shows(192)
@given(schedules(max_ranks=4, max_microbatches=4), st.integers(0, 2**32))
def test_programs_whose_receives_come_late_hang_or_are_proved(schedule, seed):
    program = late_receives(lower(schedule), random.Random(seed))
    if waiting(program):
        assert_hangs(program)
    else:
        assert hang_of(program) is None


def test_what_fails_before_it_hangs_is_not_drawn():
    """Rank 1 would compute a backward without its forward, before rank 0 waits for its gradient."""
    program = lower(build("1f1b", ranks=2, microbatches=1))
    forward, backward = Action(Op.F, 1, 0), Action(Op.B, 1, 0)
    steps = [step for step in program.ranks[1] if step not in (forward, backward, Action(Op.SEND_B, 1, 0))]
    assert hang_of(Program(program.schedule, (program.ranks[0], (backward, *steps)))) is None


def test_what_is_live_at_a_hang_is_kept_for_backwards_that_never_come():
    hang = hang_of(HANGS["some merely wait"][0]())
    assert hang is not None
    timeline = simulate(hang)
    assert timeline.peak_live_microbatches == (7.0, 7.0, 7.0, 7.0)
    assert timeline.live_microbatches(0)[-1] == (6.0, 7.0)
