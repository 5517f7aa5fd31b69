"""DualPipe and DualPipeV: the figures of their README, for any size."""

from dataclasses import replace

import pytest

from penstock.schedule import Costs, PlacementKind, flatten, simulate, verify
from tests.schedule.families import built, lowered

# Per stage F = I = W = 1.
V_COSTS = Costs(forward=2, backward_input=2, backward_weight=2)


@pytest.mark.parametrize(("pair", "end", "idle"), [(3, 66, 6), (2, 52, 3)])
def test_the_published_example_of_four_ranks(pair: float, end: float, idle: float):
    """DualPipeV of 4 ranks, 8 stages and 10 microbatches; a pair costs as much as its halves, or as B alone."""
    program = lowered("dualpipe-v", 4, 10)
    result = simulate(program, replace(V_COSTS, pair=2 * pair))
    assert [max(event.end for event in events) for events in result.events] == [end] * 4
    assert max(result.idle) <= idle
    if pair == 3:
        assert result.idle == (6,) * 4
        assert result.events == simulate(program, V_COSTS).events
    assert verify(program).peak_live_tapes == (9,) * 4


def test_the_published_example_folded_out():
    """DualPipe of 8 ranks and 20 microbatches is the same, seen from both ends."""
    program = lowered("dualpipe", 8, 20)
    result = simulate(program, Costs())
    assert [max(event.end for event in events) for events in result.events] == [66] * 8
    assert result.idle == (6,) * 8
    assert result.peak_live_microbatches == (9,) * 8


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_the_closed_form_of_the_bubble(name: str):
    """(PP/2 - 1)(F&B + B - 3W) with PP stages, as long as pairs take as long as F and B."""
    for half in range(1, 5):
        for m in (2 * half, 2 * half + 3, 6 * half):
            ranks, microbatches = (half, m) if name == "dualpipe-v" else (2 * half, 2 * m)
            stages = 2 if name == "dualpipe-v" else 1
            for forward, inputs, weights in ((1, 1, 1), (2, 2, 1), (4, 5, 3)):
                costs = Costs(forward * stages, inputs * stages, weights * stages)
                bubble = (half - 1) * (forward + 2 * (inputs + weights) - 3 * weights)
                idle = max(simulate(lowered(name, ranks, microbatches), costs).idle)
                # The form takes F and I to be alike.
                assert idle == bubble if forward == inputs else idle <= bubble
            assert set(verify(lowered(name, ranks, microbatches)).peak_live_tapes) == {min(2 * half + 1, 2 * m)}


def test_each_half_of_the_microbatches_has_its_own_copy_of_the_model():
    for ranks in range(1, 9):
        for microbatches in (1, 2, 5, 16, 33):
            schedule = built("dualpipe", ranks, microbatches)
            placement = schedule.placement
            assert placement.kind is PlacementKind.BIDIRECTIONAL and placement.stages_per_microbatch == 1
            seen = {}
            for order in schedule.orders:
                for action in flatten(order):
                    seen.setdefault(action.stage, set()).add(action.microbatch)
            share = -(-microbatches // 2)
            for stage in range(2 * ranks):
                due = range(share) if stage < ranks else range(share, microbatches)
                assert seen.get(stage, set()) == set(due)


def test_pairs_that_take_less_time_shorten_the_step():
    for name in ("dualpipe", "dualpipe-v"):
        program = lowered(name, 4, 16)
        slow, fast = (simulate(program, replace(V_COSTS, pair=pair)).makespan for pair in (6, 4))
        assert fast < slow
