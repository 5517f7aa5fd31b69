"""Schedules and programs written and read again; what is malformed is refused by place and rule."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import (
    Action,
    Op,
    Pair,
    PlacementKind,
    Program,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    from_text,
    lower,
    to_csv,
    to_text,
    verify,
)
from penstock.schedule.actions import COMPUTE, TRANSFERS, flatten
from tests.schedule.random_schedules import schedules


@given(schedules())
def test_text_keeps_any_schedule_and_program(schedule: Schedule):
    program = lower(schedule)
    assert from_text(to_text(schedule)) == schedule
    assert from_text(to_text(program)) == program


@given(schedules())
def test_csv_keeps_the_order_of_every_rank(schedule: Schedule):
    if schedule.placement.kind is PlacementKind.BIDIRECTIONAL:
        with pytest.raises(ValueError, match="one copy of the model"):
            to_csv(schedule)
        return
    program = lower(schedule)
    read_schedule, read_program = from_csv(to_csv(schedule)), from_csv(to_csv(program))
    if not TRANSFERS & {action.op for steps in program.ranks for action in flatten(steps)}:
        assert read_program == read_schedule
        return
    assert isinstance(read_schedule, Schedule) and isinstance(read_program, Program)
    assert read_schedule.orders == schedule.orders == read_program.schedule.orders
    assert read_program.ranks == program.ranks
    for read in (read_schedule, read_program.schedule):
        assert (read.num_microbatches, read.training) == (schedule.num_microbatches, schedule.training)
        stages = range(schedule.placement.num_stages)
        assert [read.placement.rank_of(stage) for stage in stages] == list(map(schedule.placement.rank_of, stages))


def test_idle_cells_and_words_without_meaning_are_skipped():
    text = (
        "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,,0B0,0RESHARD,0REDUCE_GRAD\r\n,1RECV_F0,1F0, 1B0 ,1SEND_B0,1REDUCE_GRAD,\r\n"
    )
    program = from_csv("\ufeff" + text)
    assert isinstance(program, Program)
    assert [str(action) for action in program.ranks[1]] == [
        "1RECV_F0",
        "1F0",
        "1B0",
        "1SEND_B0",
        "1REDUCE_GRAD",
        "STEP",
    ]
    assert verify(program).num_messages == 2


def test_reductions_that_the_file_leaves_out_are_placed():
    program = lower(build("1f1b", ranks=3, microbatches=3))
    without = re.sub(r",\dREDUCE_GRAD", "", to_csv(program))
    assert "REDUCE" in to_csv(program) and "REDUCE" not in without
    read = from_csv(without)
    assert isinstance(read, Program) and read.ranks == program.ranks
    # One that is left out where the others are not is missing.
    halved = from_csv(to_csv(program).replace(",1REDUCE_GRAD", ""))
    assert isinstance(halved, Program)
    with pytest.raises(ScheduleError, match="STEP waits for 1REDUCE_GRAD"):
        verify(halved)


def test_a_fused_pair_is_one_cell():
    # One rank, as DualPipe fuses them: forward of one microbatch, backward of another.
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert isinstance(schedule, Schedule)
    assert schedule.orders[0][1] == Pair(Action(Op.F, 0, 1), Action(Op.B, 0, 0))
    assert to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("0F0,0X0\n", ["row 1, cell 2", "'0X0'", "<stage><op><microbatch>"]),
        ("0F0\n1F0,,1F\n", ["row 2, cell 3", "'1F'", "must name a microbatch"]),
        ("0F0,0REDUCE_GRAD3\n", ["row 1, cell 2", "must not name a microbatch"]),
        ("0F0,-1F0\n", ["row 1, cell 2", "'-1F0'"]),
        ("0F0 0F1\n", ["row 1, cell 1", "'0F0 0F1'"]),
        ("0F99999999999999999999\n", ["row 1, cell 1"]),
        ("0F0,0F١\n", ["row 1, cell 2"]),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", ["row 1, cell 2", "a pair is an F with a B or an I"]),
        ("0F0,(0F1;)OVERLAP_F_B\n", ["row 1, cell 2"]),
        ("0F0,(0F1;0UNSHARD)OVERLAP_F_B\n", ["row 1, cell 2", "is no action"]),
        ("0F0\n\n1F0\n", ["row 2", "empty"]),
        ("0F0\n1F0,0F1\n", ["row 2, cell 2", "0F1 is on stage 0 of row 1"]),
        ("0F0\n2F0\n", ["row 2 has stage 2", "no row has stage 1"]),
        ("0F0,0F5\n1F0,1F5\n", ["4 actions are too few for 2 stages and 6 microbatches"]),
        ("0F0,0B0,STEP\n", ["row 1, cell 3", "STEP", "implies"]),
        ("0REDUCE_GRAD\n", ["computes anything"]),
        ('0F0\n1F0,"1F1\n', ["row 2", "CSV"]),
    ],
)
def test_a_malformed_csv_is_refused_with_row_cell_and_rule(text: str, words: list[str]):
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    for word in words:
        assert word in str(caught.value)


def text_with(line: int, words: str) -> str:
    lines = to_text(build("1f1b", ranks=2, microbatches=2)).splitlines()
    lines[line - 1 : line] = [words] if words else []
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        (1, "penstock schedule 2", "line 1: expected 'penstock schedule 1'"),
        (3, "placement: ring", "'ring' is not a valid PlacementKind"),
        (4, "ranks: two", "the head of the file is wrong"),
        (4, "ranks: 3", "3 ranks need as many orders, got 2"),
        (4, "rank: 2", "line 4: expected one of ranks"),
        (5, "stages_per_rank: 0", "stages_per_rank must be a whole number of at least 1, got 0"),
        (6, "microbatches: 1000000000", "8 actions are too few for 2 stages and 1000000000 microbatches"),
        (6, "", "the line 'microbatches' is missing"),
        (7, "training: maybe", "training is yes or no, not 'maybe'"),
        (8, "live_bound: 1", "2 ranks need as many bounds, got 1"),
        (9, "rank 0: 0F0 0F1 0B0 0b1", "line 9, word 4: '0b1' is no action"),
        (10, "rank 0: 1F0", "line 10: expected one of rank 1"),
        (10, "", "2 ranks need as many orders, got 1"),
    ],
)
def test_a_malformed_text_is_refused_by_line_and_rule(line: int, words: str, message: str):
    with pytest.raises(ScheduleError) as caught:
        from_text(text_with(line, words))
    assert message in str(caught.value)


@given(st.text(alphabet="0123FBIWSENDRCV_();,\n OLAPSTUH\"'", max_size=60))
def test_whatever_is_read_is_refused_or_a_plan(text: str):
    for read in (from_csv, from_text):
        try:
            plan = read(text)
        except ScheduleError:
            continue
        schedule = plan.schedule if isinstance(plan, Program) else plan
        assert all(action.op in COMPUTE for order in schedule.orders for action in flatten(order))
        try:
            verify(plan if isinstance(plan, Program) else lower(plan))
        except ScheduleError:
            continue
