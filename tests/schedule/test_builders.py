"""The builders over a grid: legal, in exactly their order, within their bounds; and the errors of `build`."""

import pytest

from penstock.schedule import Action, Op, PlacementKind, build, default_stages, describe, lower, names, options, verify
from penstock.schedule.actions import flatten
from tests.covering import EVERY, pairs_of
from tests.schedule.families import NAMES, built, lowered, stages_of

RANKS = range(1, 9)
MICROBATCHES = range(1, 34)
GRID = [(ranks, microbatches) for ranks in RANKS for microbatches in MICROBATCHES]
# Around the multiples of p and of the group sizes, where orders change their shape, and the ends of the range.
SOME_MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 33)


def messages_of_one(kind: PlacementKind, ranks: int, stages_per_rank: int) -> int:
    """How many borders between ranks a microbatch crosses on its way through the model."""
    if ranks == 1:
        return 0
    return {
        PlacementKind.LOOP: ranks * stages_per_rank - 1,
        PlacementKind.V: (ranks - 1) * stages_per_rank,
        PlacementKind.BIDIRECTIONAL: ranks - 1,
    }[kind]


@pytest.mark.shows(1, 6, 7)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_legal(name: str):
    counts = MICROBATCHES if EVERY else SOME_MICROBATCHES
    for ranks, microbatches, stages_per_rank in pairs_of(RANKS, counts, stages_of(name)):
        schedule = built(name, ranks, microbatches, stages_per_rank)
        ways = 2 if schedule.training else 1
        borders = messages_of_one(schedule.placement.kind, ranks, stages_per_rank)
        proof = verify(lowered(name, ranks, microbatches, stages_per_rank))
        assert proof.num_messages == ways * borders * microbatches, (ranks, microbatches, stages_per_rank)
        # The bound is no more than what is used.
        assert proof.peak_live_tapes == schedule.live_bound, (ranks, microbatches, stages_per_rank)


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_takes_microbatches_in_order(name: str):
    """Forwards, backwards and weight gradients alike: so gradients are added up in one order by every schedule."""
    for ranks in RANKS:
        for stages_per_rank in stages_of(name):
            for microbatches in (1, 3, 8, 17):
                schedule = built(name, ranks, microbatches, stages_per_rank)
                for rank, order in enumerate(schedule.orders):
                    for stage in schedule.placement.stages_of(rank):
                        for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W)) if schedule.training else ((Op.F,),):
                            seen = [a.microbatch for a in flatten(order) if a.op in ops and a.stage == stage]
                            assert seen == list(schedule.microbatches_of(stage))


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_has_the_stages_it_is_meant_for_or_says_how_many(name: str):
    assert default_stages(name) in stages_of(name)
    assert build(name, ranks=2, microbatches=3).placement.stages_per_rank == default_stages(name)
    for stages_per_rank in {1, 2, 3, 4} - set(stages_of(name)):
        with pytest.raises(ValueError, match=f"stages_per_rank must be {default_stages(name)}, got {stages_per_rank}"):
            build(name, ranks=2, microbatches=3, stages_per_rank=stages_per_rank)


def test_published_schedules_have_these_numbers_of_stages():
    numbers = {
        **dict.fromkeys(("1f1b", "combined-1f1b", "zb-h1", "zb-h2"), (1,)),
        **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v", "dualpipe"), (2,)),
        **dict.fromkeys(("afab", "looped-bfs", "interleaved", "interleaved-zb"), (1, 2, 3, 4)),
        **dict.fromkeys(("combined-interleaved", "inference"), (1, 2, 3, 4)),
    }
    assert {name: stages_of(name) for name in numbers} == numbers


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


def test_each_schedule_has_one_line_of_description():
    lines = [describe(name) for name in names()]
    assert len(set(lines)) == len(lines) >= 3
    assert all(line and "\n" not in line for line in lines)
    assert options("1f1b") == {}
    assert options("interleaved") == options("interleaved-zb") == {"group_size": None}
