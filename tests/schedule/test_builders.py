"""The builders over a grid: legal, in exactly their order, within their bounds; and the errors of `build`."""

import pytest

from penstock.schedule import Action, Op, build, describe, lower, names, options, verify
from penstock.schedule.actions import RECEIVES, SENDS, flatten

RANKS = range(1, 9)
MICROBATCHES = range(1, 26)
GRID = [(ranks, microbatches) for ranks in RANKS for microbatches in MICROBATCHES]
SEVERAL_STAGES = ("afab", "inference")


@pytest.mark.shows(1)
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_is_legal(name: str, ranks: int):
    for microbatches in MICROBATCHES:
        for receives_ahead in (1, 2):
            schedule = build(name, ranks=ranks, microbatches=microbatches)
            proof = verify(lower(schedule, receives_ahead=receives_ahead))
            ways = 2 if schedule.training else 1
            assert proof.num_messages == ways * (ranks - 1) * microbatches
            # The bound is no more than what is used.
            assert proof.peak_live_tapes == schedule.live_bound


@pytest.mark.parametrize("name", SEVERAL_STAGES)
@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_several_stages_a_rank_are_legal(name: str, stages_per_rank: int):
    for ranks in RANKS:
        for microbatches in (1, 2, 3, 5, 8, 13):
            schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
            proof = verify(lower(schedule))
            num_borders = ranks * stages_per_rank - 1 if ranks > 1 else 0
            assert proof.num_messages == (2 if schedule.training else 1) * num_borders * microbatches
            assert proof.peak_live_tapes == schedule.live_bound


@pytest.mark.parametrize("name", names())
def test_each_stage_takes_microbatches_in_order(name: str):
    stages_per_rank = 3 if name in SEVERAL_STAGES else 1
    for ranks, microbatches in GRID:
        schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
        for rank, order in enumerate(schedule.orders):
            for stage in schedule.placement.stages_of(rank):
                for op in (Op.F, Op.B) if schedule.training else (Op.F,):
                    seen = [action for action in flatten(order) if action.op is op and action.stage == stage]
                    assert seen == [Action(op, stage, number) for number in range(microbatches)]


@pytest.mark.shows(2)
def test_afab_runs_all_forwards_then_all_backwards():
    for ranks, microbatches in GRID:
        schedule = build("afab", ranks=ranks, microbatches=microbatches)
        for stage, order in enumerate(schedule.orders):
            assert order == tuple(Action(op, stage, number) for op in (Op.F, Op.B) for number in range(microbatches))
        assert verify(lower(schedule)).peak_live_tapes == (microbatches,) * ranks


@pytest.mark.shows(3)
def test_1f1b_warms_up_alternates_and_drains():
    for ranks, microbatches in GRID:
        schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
        for stage, order in enumerate(schedule.orders):
            warm_up = min(ranks - stage - 1, microbatches)
            letters = "".join(action.op.name for action in flatten(order))
            assert letters == "F" * warm_up + "FB" * (microbatches - warm_up) + "B" * warm_up
        bounds = tuple(min(ranks - stage, microbatches) for stage in range(ranks))
        assert verify(lower(schedule)).peak_live_tapes == bounds


def lock_step_order(num_stages: int, stage: int, num_microbatches: int) -> list[tuple[str, int]]:
    """1F1B as 2(m+p-1) clock ticks of all ranks: even stages run forwards on even ticks, odd stages on odd ones."""
    order = []
    for tick in range(2 * (num_microbatches + num_stages - 1)):
        forward = tick % 2 == stage % 2
        if forward:
            number = tick // 2 - stage // 2 if tick % 2 == 0 else (tick - 1) // 2 - stage // 2
        elif tick % 2 == 0:
            number = tick // 2 - num_stages + (stage + 1) // 2
        else:
            number = (tick - 1) // 2 - num_stages + 1 + stage // 2
        if 0 <= number < num_microbatches:
            order.append(("F" if forward else "B", number))
    return order


@pytest.mark.shows(3)
def test_1f1b_is_the_order_of_the_lock_step_formulation():
    for ranks, microbatches in GRID:
        schedule = build("1f1b", ranks=ranks, microbatches=microbatches)
        for stage, order in enumerate(schedule.orders):
            ours = [(action.op.name, action.microbatch) for action in flatten(order)]
            assert ours == lock_step_order(ranks, stage, microbatches)


@pytest.mark.shows(5)
def test_inference_sends_each_output_at_once():
    for ranks, microbatches in GRID:
        program = lower(build("inference", ranks=ranks, microbatches=microbatches))
        for stage, steps in enumerate(program.ranks):
            computed = [action for action in flatten(steps) if action.op is Op.F]
            assert computed == [Action(Op.F, stage, number) for number in range(microbatches)]
            waiting = peak = 0
            for action in flatten(steps):
                waiting += {Op.F: 1, Op.SEND_F: -1}.get(action.op, 0)
                peak = max(peak, waiting)
            if stage < ranks - 1:
                assert (waiting, peak) == (0, 1)


@pytest.mark.shows(6)
@pytest.mark.parametrize("name", names())
def test_one_rank_sends_nothing(name: str):
    for microbatches in MICROBATCHES:
        program = lower(build(name, ranks=1, microbatches=microbatches))
        (steps,) = program.ranks
        assert steps[:microbatches]
        assert not any(action.op in SENDS | RECEIVES for action in flatten(steps))


def test_each_schedule_has_one_line_of_description():
    lines = [describe(name) for name in names()]
    assert len(set(lines)) == len(lines) >= 3
    assert all(line and "\n" not in line for line in lines)
    assert all(options(name) == {} for name in names())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "1f1"}, ["'1f1'", "did you mean '1f1b'", "afab"]),
        ({"name": "AFAB"}, ["'AFAB'", "did you mean 'afab'"]),
        ({"name": "quite another"}, ["'quite another'", "afab, 1f1b, inference"]),
        ({"ranks": 0}, ["ranks", "at least 1", "0"]),
        ({"ranks": 2.0}, ["ranks", "2.0"]),
        ({"microbatches": -3}, ["microbatches", "at least 1", "-3"]),
        ({"microbatches": True}, ["microbatches", "True"]),
        ({"stages_per_rank": 0}, ["stages_per_rank", "at least 1"]),
        ({"stages_per_rank": 2}, ["1f1b", "stages_per_rank must be 1", "2"]),
        ({"group_size": 4}, ["1f1b", "'group_size'", "none"]),
    ],
)
def test_impossible_requests_say_what_is_possible(arguments: dict, words: list[str]):
    with pytest.raises(ValueError) as caught:
        build(**{"name": "1f1b", "ranks": 2, "microbatches": 4} | arguments)
    for word in words:
        assert word in str(caught.value)
