"""ZB-H1 and ZB-H2 against the published tables and their rules."""

import pytest

from penstock.schedule import Costs, flatten, simulate
from tests.schedule.families import PUBLISHED, Published, built, lowered


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_published_bubbles(row: Published):
    found = [simulate(lowered(name, 8, row.microbatches), row.costs).bubble_rate for name in ("1f1b", "zb-h1", "zb-h2")]
    assert [round(rate, 4) for rate in found] == [row.one_f_one_b, row.h1, row.h2]
    # Of this one the times are known to that.
    interleaved = simulate(lowered("interleaved", 8, row.microbatches, row.v), row.costs)
    assert interleaved.bubble_rate == pytest.approx(row.interleaved, abs=0.004)


@pytest.mark.shows(7)
@pytest.mark.parametrize(("name", "lead"), [("zb-h1", 1), ("zb-h2", 2)])
def test_warm_up_and_by_how_much_w_falls_behind(name: str, lead: int):
    for p in range(1, 9):
        for m in (1, 2, p, 3 * p, 33):
            for stage, order in enumerate(built(name, p, m).orders):
                letters = "".join(action.op.name for action in flatten(order))
                warm_up = min(lead * (p - stage - 1), m)
                num_pairs = m - warm_up
                behind = min(lead * stage, num_pairs)
                steady = "FI" * behind + "FIW" * (num_pairs - behind)
                assert letters == "F" * warm_up + steady + "IW" * warm_up + "W" * behind


@pytest.mark.parametrize(("name", "lead"), [("zb-h1", 1), ("zb-h2", 2)])
def test_every_stage_has_the_memory_of_the_first(name: str, lead: int):
    for p in range(1, 9):
        for m in (1, 2, p, 2 * p, 3 * p, 33):
            live = (min(lead * (p - 1) + 1, m),) * p
            assert built(name, p, m).live_bound == live
            assert simulate(lowered(name, p, m)).peak_live_microbatches == live


def test_few_microbatches_take_the_closed_form():
    """With m <= p nothing but the way there and back counts: (m+p-1)(F+I) and one W."""
    costs = Costs(forward=5, backward_input=7, backward_weight=3)
    for p in range(1, 9):
        for m in range(1, p + 1):
            assert simulate(lowered("zb-h1", p, m), costs).makespan >= (m + p - 1) * 12 + 3
            assert simulate(lowered("1f1b", p, m), costs).makespan == (m + p - 1) * 15


def test_with_equal_times_h2_has_no_bubble():
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 4 * p, 33):
            result = simulate(lowered("zb-h2", p, m))
            assert result.bubble_rate == 0 and result.makespan == 3 * m + p - 1
