"""The benchmark of predictions made here: what follows from units' times and known runs, and what is said of it."""

from collections.abc import Sequence

import pytest
from benchmarks.plan_here import (
    COMBINATIONS,
    KNOWN,
    MODEL,
    NUM_RANKS,
    Combination,
    Foreseen,
    Round,
    StepTime,
    UnitStep,
    fit_constants,
    foreseen,
    sentence,
    summary,
)

from penstock.planner.times import Constants, Order
from penstock.schedule import Costs

NUM_UNITS = sum(KNOWN[0].cut)


def _units(num_microbatches: int) -> Costs:
    """Units of different times, in proportion to a microbatch's size."""
    size = 1 / num_microbatches
    forward = [(1 + i % 3) * size for i in range(NUM_UNITS)]
    return Costs(forward, [(1 + i % 2) * size for i in range(NUM_UNITS)], [size] * NUM_UNITS)


def _step(one: Combination) -> UnitStep:
    order = Order(one.name, NUM_RANKS, one.num_microbatches, one.stages_per_rank, early_gradients=True)
    return UnitStep(order, one.cut, _units(one.num_microbatches))


def _round(combinations: Sequence[Combination], constants: Constants, rest_s: float) -> Round:
    """What a machine measures on which units and actions take what the constants say."""
    steps = {one: StepTime(_step(one).seconds(constants) + rest_s, rest_s) for one in combinations}
    return Round({number: _units(number) for number in (4, 8, 16)}, steps)


def test_constants_are_found_again_from_the_steps_that_follow_from_them():
    planted = Constants(compute=0.8, action_s=0.004)
    found = fit_constants([(_step(one), _step(one).seconds(planted)) for one in KNOWN])
    assert found.compute == pytest.approx(0.8, rel=1e-3) and found.action_s == pytest.approx(0.004, rel=1e-2)


def test_a_step_takes_what_its_units_and_actions_take():
    one = Combination("1f1b", (NUM_UNITS - 4, 4), 4)
    plain = _step(one).seconds(Constants(compute=1.0, action_s=0.0))
    assert _step(one).seconds(Constants(compute=0.5, action_s=0.0)) == pytest.approx(2 * plain)
    # The first rank is the longest path: its four forwards and four backwards.
    assert _step(one).seconds(Constants(compute=1.0, action_s=0.01)) == pytest.approx(plain + 8 * 0.01)
    even = _step(Combination("1f1b", KNOWN[0].cut, 4))
    assert even.seconds(Constants(compute=1.0, action_s=0.0)) < plain


@pytest.mark.shows(143)
def test_each_combination_is_predicted_from_its_own_round_alone():
    rounds = [
        _round((*KNOWN, *COMBINATIONS), Constants(compute=0.9, action_s=0.001), rest_s=0.2),
        _round((*KNOWN, *COMBINATIONS), Constants(compute=0.45, action_s=0.002), rest_s=0.4),
    ]
    for one in COMBINATIONS:
        found = foreseen(one, rounds)
        assert found.predicted_s == pytest.approx(found.measured_s, rel=2e-3)
        assert found.measured_s[1] == pytest.approx(2 * found.measured_s[0])


@pytest.mark.shows(143)
def test_every_combination_trains_the_whole_model_on_all_of_its_sequences():
    units = len(MODEL.units())
    assert len(set(COMBINATIONS) | set(KNOWN)) == len(COMBINATIONS) + len(KNOWN) >= 15
    for one in (*KNOWN, *COMBINATIONS):
        assert sum(one.cut) == units
        assert one.training.step_tokens == KNOWN[0].training.step_tokens


@pytest.mark.shows(143)
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
