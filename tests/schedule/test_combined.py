"""Combined 1F1B: fused pairs that never need each other, at twice the lead."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.schedule import (
    Action,
    Costs,
    Op,
    Pair,
    Schedule,
    ScheduleError,
    build,
    from_csv,
    lower,
    simulate,
    verify,
)
from penstock.schedule.actions import flatten, parts
from penstock.schedule.builders import one_f_one_b
from penstock.schedule.builders.orders import fuse_turns
from tests.schedule.families import built, lowered

GRID = [(p, v, m) for p in range(1, 9) for v in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)]


def forward(microbatch: int) -> Action:
    return Action(Op.F, 0, microbatch)


def backward(microbatch: int) -> Action:
    return Action(Op.B, 0, microbatch)


@pytest.mark.shows(37)
def test_one_rank_pairs_each_backward_with_the_next_forward():
    for m in range(1, 9):
        (order,) = built("combined-1f1b", 1, m).orders
        pairs = tuple(Pair(forward(number + 1), backward(number)) for number in range(m - 1))
        assert order == (forward(0), *pairs, backward(m - 1))
        assert build("combined", ranks=1, microbatches=m).orders == (order,)


@pytest.mark.shows(33)
@pytest.mark.parametrize("split_backward", [False, True])
def test_one_rank_reduces_once_behind_the_last_backward_which_stands_alone(split_backward: bool):
    for m in range(1, 9):
        program = lower(build("combined-1f1b", ranks=1, microbatches=m, split_backward=split_backward))
        (steps,) = program.ranks
        reductions = [place for place, step in enumerate(steps) if step == Action(Op.REDUCE_GRAD, 0)]
        assert len(reductions) == 1
        before, after = steps[: reductions[0]], steps[reductions[0] + 1 :]
        assert not isinstance(before[-1], Pair), "the last backward has no forward beside it"
        assert [a.microbatch for a in parts(before[-1])] == [m - 1]
        assert [a.op for step in after for a in parts(step)] == [Op.STEP]


@pytest.mark.shows(42)
def test_split_backwards_leave_the_pairs_and_their_partners_as_they_are():
    for name, p, v in (("combined-1f1b", 1, 1), ("combined-1f1b", 3, 1), ("combined-interleaved", 2, 3)):
        for m in (1, 2, 7):
            sizes = {"ranks": p, "microbatches": m, "stages_per_rank": v}
            whole, split = build(name, **sizes), build(name, **sizes, split_backward=True)
            verify(lower(split))
            for order, its in zip(split.orders, whole.orders, strict=True):
                inputs = [step for step in order if not (isinstance(step, Action) and step.op is Op.W)]
                assert [str(step) for step in inputs] == [re.sub(r"(\d)B(\d)", r"\1I\2", str(step)) for step in its]
                for step, behind in pairwise(order):
                    made = [a for a in parts(step) if a.op is Op.I]
                    assert [Action(Op.W, a.stage, a.microbatch) for a in made] in ([], [behind])


@pytest.mark.shows(49)
def test_without_local_stages_the_lead_and_memory_double_and_the_ranks_are_busy():
    for p in range(1, 9):
        for m in (1, 2, p, 3 * p, 16 * p):
            schedule = built("combined-1f1b", p, m)
            assert schedule.live_bound == tuple(min(2 * (p - stage), m) for stage in range(p))
            for stage, order in enumerate(schedule.orders):
                warm_up = min(2 * (p - stage - 1) + 1, m)
                assert all(step == Action(Op.F, stage, at) for at, step in enumerate(order[:warm_up]))
                assert all(isinstance(step, Pair) for step in order[warm_up:m])
                assert all(isinstance(step, Action) and step.op is Op.B for step in order[m:])
        result = simulate(lowered("combined-1f1b", p, 16 * p), Costs(1, 1, 1))
        assert 1 - max(result.idle) / result.makespan >= 0.94


@pytest.mark.shows(52)
@pytest.mark.parametrize("p", range(1, 9))
def test_no_pair_depends_on_itself(p: int):
    """Whatever the sizes: its halves are of different microbatches, and the proof finds no other way round."""
    num_pairs = 0
    for v in (1, 2, 3, 4):
        for m in (1, 3, 4, 8, 9, 17):
            for n in {p, p + 1, 2 * p, max(1, p - 1), m}:
                schedule = build("combined-interleaved", ranks=p, microbatches=m, stages_per_rank=v, group_size=n)
                assert verify(lower(schedule)).peak_live_tapes == schedule.live_bound
                pairs = [step for order in schedule.orders for step in order if isinstance(step, Pair)]
                assert all(pair.forward.microbatch != pair.backward.microbatch for pair in pairs)
                num_pairs += len(pairs)
    assert num_pairs > 100


@pytest.mark.shows(51)
def test_the_warm_up_is_the_interleaved_one_and_one_more():
    for p, v, m in GRID:
        if m >= p and m % p > 0:
            continue
        for rank, order in enumerate(built("combined-interleaved", p, m, v).orders):
            num_alone = next((at for at, step in enumerate(order) if isinstance(step, Pair)), m * v)
            assert num_alone == min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v)


@pytest.mark.shows(52)
@pytest.mark.parametrize("name", ["combined-1f1b", "combined-interleaved"])
def test_with_one_warm_up_forward_less_the_builders_schedule_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder's own code, started with a forward less on every rank, makes a pair that needs itself."""
    sizes = [(p, v, m) for p, v, m in GRID if 2 * p <= m <= 17 and (v == 1 or name == "combined-interleaved")]
    whole = one_f_one_b.num_ahead
    monkeypatch.setattr(one_f_one_b, "num_ahead", lambda placement, rank, size: whole(placement, rank, size) - 1)
    for p, v, m in sizes:
        with pytest.raises(ValueError, match=f"^{p * v - 1}B0 needs {p * v - 1}F0, so they cannot be one pair$"):
            build(name, ranks=p, microbatches=m, stages_per_rank=v)
    assert len(sizes) > 20


def fewer_forwards(schedule: Schedule, rank: int, fewer: int) -> Schedule:
    """The schedule, whose rank starts with so many forwards less: each later one is paired with a later backward."""
    order = schedule.orders[rank]
    own = {op: [a for a in flatten(order) if (a.op is Op.F) == (op is Op.F)] for op in (Op.F, Op.B)}
    warm_up = next(at for at, step in enumerate(order) if isinstance(step, Pair)) - fewer
    orders = list(schedule.orders)
    orders[rank] = tuple(fuse_turns(own[Op.F], own[Op.B], warm_up))
    return replace(schedule, orders=tuple(orders))


@pytest.mark.shows(52)
@pytest.mark.parametrize("p", range(2, 9))
def test_the_proof_refuses_the_builders_schedule_where_a_rank_pairs_too_early(p: int) -> None:
    """One forward less may still do on a rank before the last, which starts with one to spare; a second never does."""
    schedule = build("combined-1f1b", ranks=p, microbatches=3 * p)
    with pytest.raises(ValueError, match=f"{p - 1}B0 needs {p - 1}F0"):
        fewer_forwards(schedule, p - 1, 1)
    for rank in range(p - 1):
        verify(lower(fewer_forwards(schedule, rank, 1)))
        with pytest.raises(ScheduleError, match=r"deadlock"):
            verify(lower(fewer_forwards(schedule, rank, 2)))


def test_a_file_with_such_a_pair_is_refused_by_its_cell():
    with pytest.raises(ScheduleError, match="row 1, cell 2: 0B1 needs 0F1, so they cannot be one pair"):
        from_csv("0F0,(0F1;0B1)OVERLAP_F_B,0B0\n")


def test_one_stage_a_rank_is_the_order_without_local_stages():
    for p in (1, 2, 4):
        assert built("combined-interleaved", p, 2 * p, 1).orders == built("combined-1f1b", p, 2 * p).orders
