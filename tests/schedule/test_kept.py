"""Microbatches that keep all activations where others are recomputed: marks on a program's forwards."""

import pytest

from penstock.schedule import (
    Costs,
    Op,
    Program,
    from_text,
    keep_first,
    simulate,
    to_text,
    verify,
)
from penstock.schedule.actions import flatten
from penstock.schedule.choice import ScheduleChoice
from penstock.schedule.recording import Record, Recording
from tests.schedule.families import NAMES, lowered, stages_of

TRAINING = [name for name in NAMES if name != "inference"]
PLAIN = Costs(forward=2.0, backward_input=2.0, backward_weight=1.0, microbatch_bytes=100.0, weight_memory_share=0.5)
# A forward more in each backward, and a tenth of the memory until it comes.
AGAIN = Costs(2.0, 4.0, 1.0, recompute=2.0, microbatch_bytes=10.0, kept_bytes=100.0, weight_memory_share=5.0)


def marks(program: Program) -> list[list[str]]:
    return [[str(action) for action in flatten(order) if action.op is Op.F] for order in program.ranks]


@pytest.mark.shows(188)
def test_in_1f1b_the_marks_are_those_of_megatron():
    for ranks in range(1, 6):
        for microbatches in (1, 2, 5, 9, 16):
            for num_kept in range(ranks + 2):
                found = marks(keep_first(lowered("1f1b", ranks, microbatches), num_kept))
                for rank, forwards in enumerate(found):
                    # Megatron-Core: i % max_outstanding_backprops >= num_microbatches_with_partial_... is recomputed.
                    outstanding = min(ranks - rank - 1, microbatches) + 1
                    wanted = [f"{rank}F{i}" + "K" * (i % outstanding < num_kept) for i in range(microbatches)]
                    assert forwards == wanted


@pytest.mark.shows(188)
@pytest.mark.parametrize("name", TRAINING)
def test_of_each_stage_so_many_keep_all_at_once_and_no_fewer_while_others_are_recomputed(name: str):
    for stages_per_rank in stages_of(name)[:2]:
        for num_kept in (1, 2):
            program = keep_first(lowered(name, 3, 8, stages_per_rank), num_kept)
            assert verify(program) == verify(lowered(name, 3, 8, stages_per_rank))
            for order, steps in zip(program.schedule.orders, program.ranks, strict=True):
                own = list(flatten(order))
                assert list(map(str, own)) == [str(a) for a in flatten(steps) if a.op in (Op.F, Op.B, Op.I, Op.W)]
                ends = {(a.stage, a.microbatch): at for at, a in enumerate(own) if a.op in (Op.B, Op.I)}
                for at, forward in enumerate(own):
                    if forward.op is Op.F:
                        full = sum(
                            other.keeps and other.stage == forward.stage and ends[other.stage, other.microbatch] >= at
                            for other in own[:at]
                        )
                        assert full <= num_kept and forward.keeps == (full < num_kept), (str(forward), full)


@pytest.mark.shows(188)
@pytest.mark.parametrize("name", TRAINING)
def test_a_step_takes_a_time_between_those_of_none_and_of_full_and_so_does_its_memory(name: str):
    program = lowered(name, 3, 8, stages_of(name)[0])
    kept = [simulate(keep_first(program, num_kept), AGAIN) for num_kept in (0, 1, 2, 8)]
    none = simulate(program, PLAIN)
    assert kept[0].makespan > kept[1].makespan >= kept[2].makespan >= kept[3].makespan == none.makespan
    assert kept[1].makespan > none.makespan or max(none.peak_live_microbatches) <= 1
    for rank, whole in enumerate(none.peak_live_bytes):
        bounds = [one.peak_live_bytes[rank] for one in kept]
        assert bounds == sorted(bounds) and bounds[-1] == pytest.approx(whole)
        assert bounds[0] < bounds[1] <= bounds[0] + 90.0 * program.placement.num_routes * (1 + 1e-9)
    assert len({one.peak_live_microbatches for one in kept}) == 1


def test_a_fused_pair_with_a_time_of_its_own_is_shorter_where_its_backward_need_not_recompute():
    program = keep_first(lowered("combined-1f1b", 2, 6), 1)
    costs = Costs(2.0, 4.0, 1.0, recompute=2.0, pair=6.0)
    lengths = {str(e.action): e.end - e.start for rank in simulate(program, costs).events for e in rank}
    pairs = {name: length for name, length in lengths.items() if ";" in name}
    kept = {
        f"{action.stage}B{action.microbatch}" for order in program.ranks for action in flatten(order) if action.keeps
    }
    assert set(pairs.values()) == {4.0, 6.0}
    assert all(
        length == (4.0 if name[name.index(";") + 1 : -len(")OVERLAP_F_B")] in kept else 6.0)
        for name, length in pairs.items()
    )


@pytest.mark.shows(188)
def test_text_keeps_the_marks_and_a_program_of_a_file_has_them(tmp_path):
    program = keep_first(lowered("combined-1f1b", 2, 6), 1)
    for plan in (program, program.schedule):
        text = to_text(plan)
        assert "F0K" in text and to_text(from_text(text)) == text
    path = tmp_path / "mine.txt"
    path.write_text(to_text(program.schedule))
    assert marks(ScheduleChoice.of(str(path)).checked_program(2, 6)) == marks(program)
    unmarked = lowered("combined-1f1b", 2, 6)
    assert program == unmarked and to_text(program) != to_text(unmarked)
    for plan in (unmarked, unmarked.schedule):
        path.write_text(to_text(plan))
        choice = ScheduleChoice(ScheduleChoice.of(str(path)).settings, num_kept=1)
        assert marks(choice.checked_program(2, 6)) == marks(program)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_the_mean_times_of_a_measured_step_know_what_was_not_recomputed(name: str):
    for num_kept in (0, 1):
        program = keep_first(lowered(name, 2, 8), num_kept)
        timeline = simulate(program, AGAIN)
        spans = [
            tuple(Record(e.action, 0, round(1e6 * e.start), round(1e6 * e.end)) for e in rank)
            for rank in timeline.events
        ]
        costs = Recording("mine", 1, program.placement.stages_per_microbatch, tuple(spans)).costs(8)
        assert simulate(program, costs).makespan == pytest.approx(timeline.makespan)
        assert costs.recompute == (pytest.approx(AGAIN.recompute) if num_kept else 0.0)
