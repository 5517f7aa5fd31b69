"""ZB-H1 and ZB-H2 against the published tables and their rules."""

import pytest

from penstock.schedule import Costs, flatten, simulate
from tests.schedule.families import built, lowered

PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.1083),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0837),
    (64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0444),
    (24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0698),
    (32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0559),
    (64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0294),
]


@pytest.mark.parametrize(("microbatches", "forward", "inputs", "weights", "transfer", "h1", "h2"), PUBLISHED)
def test_the_published_bubbles(microbatches, forward, inputs, weights, transfer, h1, h2):
    """Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9, eight ranks."""
    costs = Costs(forward, inputs, weights, transfer)
    rates = [simulate(lowered(name, 8, microbatches), costs).bubble_rate for name in ("zb-h1", "zb-h2")]
    assert [round(rate, 4) for rate in rates] == [h1, h2]


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
