"""The interleaved orders: Megatron's tables, any group size, and the split backward on top of them."""

import pytest

from penstock.schedule import Op, ScheduleError, build, flatten, lower, simulate, verify
from penstock.schedule.builders.orders import backwards, forwards, take_turns
from tests.covering import pairs_of

GRID = [(p, v, m) for p in range(1, 9) for v in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 17, 33)]


def passes(order: tuple, ops: tuple[Op, ...]) -> list[tuple[int, int]]:
    return [(action.stage, action.microbatch) for action in flatten(order) if action.op in ops]


def table(num_ranks: int, stages_per_rank: int, group_size: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Local stage and microbatch of every forward, counted one after the other."""
    found = []
    for first in range(0, num_microbatches, group_size):
        for place in range(stages_per_rank * group_size):
            local, member = divmod(place, group_size)
            if first + member < num_microbatches:
                found.append((local, first + member))
    return found


@pytest.mark.shows(50)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_all_orders_follow_the_table(name: str):
    for p, v, m in GRID:
        for n in {p, p + 1, 2 * p, max(1, p - 1), m}:
            schedule = build(name, ranks=p, microbatches=m, stages_per_rank=v, group_size=n)
            expected = table(p, v, n, m)
            for rank, order in enumerate(schedule.orders):
                assert passes(order, (Op.F,)) == [(p * local + rank, number) for local, number in expected]
                mirrored = [(p * (v - 1 - local) + rank, number) for local, number in expected]
                assert passes(order, (Op.B, Op.I)) == mirrored


@pytest.mark.shows(51)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_the_warm_up(name: str):
    num_checked = 0
    for p, v, m in GRID:
        for n in {p, p + 1, 2 * p, m}:
            if not (p <= n <= m and (m % n == 0 or m % n >= p)) and not (m < p == n):
                continue
            schedule = build(name, ranks=p, microbatches=m, stages_per_rank=v, group_size=n)
            for rank, order in enumerate(schedule.orders):
                letters = "".join(action.op.name for action in flatten(order))
                warm_up = min(2 * (p - rank - 1) + (v - 1) * n, m * v)
                # With forwards left, the first backward follows the forward behind the warm-up.
                assert len(letters) - len(letters.lstrip("F")) == min(warm_up + 1, m * v)
                num_checked += 1
    assert num_checked > 500


@pytest.mark.shows(53)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
@pytest.mark.parametrize("p", range(1, 9))
def test_any_group_size_and_any_remainder_is_legal(name: str, p: int):
    counts = sorted({1, 2, 3, p, p + 1, 2 * p + 1, 3 * p - 1})
    for v, m, number in pairs_of((2, 4), counts, range(7)):
        n = (1, 2, p, p + 1, 2 * p - 1, m, m + 3)[number]
        schedule = build(name, ranks=p, microbatches=m, stages_per_rank=v, group_size=n)
        assert verify(lower(schedule)).peak_live_tapes == schedule.live_bound, (v, m, n)


def test_short_groups_would_deadlock_if_they_were_not_given_their_places():
    """Why a group of fewer than p microbatches gets p places: the plain formula with a remainder of one."""
    p, v, m = 4, 3, 5
    good = build("interleaved", ranks=p, microbatches=m, stages_per_rank=v)
    orders = []
    for rank in range(p):
        plain = (pass_over(good.placement, rank, m, p) for pass_over in (forwards, backwards))
        orders.append(tuple(take_turns(*plain, warm_up=2 * (p - rank - 1) + (v - 1) * p)))
    bad = type(good)("plain", good.placement, m, tuple(orders))
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(lower(bad))
    assert verify(lower(good)).num_messages == 2 * (p * v - 1) * m


def test_splitting_the_backward_shortens_the_step_at_the_first_ranks_memory():
    for p in (2, 4, 8):
        for v in (1, 2, 4):
            for m in (p, 2 * p, 4 * p):
                whole, split = (
                    build(name, ranks=p, microbatches=m, stages_per_rank=v)
                    for name in ("interleaved", "interleaved-zb")
                )
                assert whole.live_bound is not None and split.live_bound is not None
                assert max(split.live_bound) == max(whole.live_bound)
                assert simulate(lower(split)).makespan < simulate(lower(whole)).makespan
