"""The planner held to this machine: what follows from units' times and known runs."""

from dataclasses import replace

import pytest

from penstock.bench.predicted import (
    COMBINATIONS,
    KNOWN,
    MODEL,
    Combination,
    Foreseen,
    KnownRun,
    fit_constants,
    predict,
    sentence,
    summary,
)
from penstock.engine.timed_cut import UnitTimes
from penstock.planner.times import Constants

NUM_UNITS = sum(KNOWN[0].cut)


def _times(num_microbatches: int) -> list[UnitTimes]:
    """Units of different times, in proportion to a microbatch's size."""
    size = 1 / num_microbatches
    return [UnitTimes((1 + i % 3) * size, (1 + i % 2) * size, size) for i in range(NUM_UNITS)]


TIMES = {number: _times(number) for number in (4, 8, 16)}


def _known(constants: Constants, rest_s: float) -> list[KnownRun]:
    return [KnownRun(one, predict(one, TIMES[one.num_microbatches], constants) + rest_s, rest_s) for one in KNOWN]


def test_constants_are_found_again_from_the_steps_that_follow_from_them():
    planted = Constants(compute=0.8, action_s=0.004)
    found = fit_constants(_known(planted, rest_s=0.3), TIMES)
    assert found.compute == pytest.approx(0.8, rel=1e-3) and found.action_s == pytest.approx(0.004, rel=1e-2)


def test_a_step_takes_what_its_units_and_actions_take():
    one = Combination("1f1b", (NUM_UNITS - 4, 4), 4)
    plain = predict(one, TIMES[4], Constants(compute=1.0, action_s=0.0))
    assert predict(one, TIMES[4], Constants(compute=0.5, action_s=0.0)) == pytest.approx(2 * plain)
    # The first rank is the longest path: its four forwards and four backwards.
    delayed = predict(one, TIMES[4], Constants(compute=1.0, action_s=0.01))
    assert delayed == pytest.approx(plain + 8 * 0.01)
    assert predict(replace(one, cut=KNOWN[0].cut), TIMES[4], Constants(compute=1.0, action_s=0.0)) < plain


def test_every_combination_trains_the_whole_model_on_all_of_its_sequences():
    units = len(MODEL.units())
    assert len(set(COMBINATIONS) | set(KNOWN)) == len(COMBINATIONS) + len(KNOWN) >= 15
    for one in (*KNOWN, *COMBINATIONS):
        assert sum(one.cut) == units
        assert one.training.step_tokens == KNOWN[0].training.step_tokens


def test_a_summary_says_what_choosing_by_prediction_costs():
    runs = [
        Foreseen("a", (1.0, 1.1, 9.0), (1.0, 1.0, 9.0)),
        Foreseen("b", (0.9, 0.9, 0.9), (1.2, 1.2, 1.2)),
    ]
    found = summary(runs)
    assert [row["error"] for row in found["runs"]] == pytest.approx([0.0, -0.25])
    assert found["mean_error"] == pytest.approx(0.125) and found["worst_error"] == pytest.approx(0.25)
    assert (found["chosen"], found["best"]) == ("b", "a") and found["chosen_over_best"] == pytest.approx(1.2)
    assert "b, predicted to be the fastest, took 20.0% longer than a" in sentence(found)
