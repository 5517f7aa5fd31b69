"""Learning rate, weight decay and loss scale against their closed forms, written here a second time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.engine.optimizer.optimizer import LossScaler
from penstock.settings import LearningRate, WeightDecay

# Both sides do a few float64 operations.
EXACT = 1e-14


def _expected_rate(decay: str, t: int, w: int, n: int, peak: float, initial: float, floor: float) -> float:
    if t < w:
        return initial + (peak - initial) * t / w
    x = min((t - w) / (n - w), 1.0) if n > w else 1.0
    return {
        "constant": peak,
        "linear": peak + (floor - peak) * x,
        "cosine": floor + (peak - floor) * math.cos(math.pi * x / 2) ** 2,
        "inverse_sqrt": max(floor, peak / math.sqrt(max(t, 1) / max(w, 1))),
    }[decay]


@pytest.mark.shows(94)
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine", "inverse_sqrt"])
@pytest.mark.parametrize("num_warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("initial, floor", [(0.0, 0.0), (0.1, 0.3)])
def test_learning_rates_equal_their_closed_forms(
    decay: str, num_warmup_steps: int, initial: float, floor: float
) -> None:
    peak, end = 0.8, 20
    rate = LearningRate(peak, decay, num_warmup_steps, end, initial, floor)  # type: ignore[arg-type]
    for step in range(1, 40):
        expected = _expected_rate(decay, step, num_warmup_steps, end, peak, initial, floor)
        assert rate(step) == pytest.approx(expected, rel=EXACT, abs=EXACT)
        assert min(floor, initial) <= rate(step) <= peak


@pytest.mark.shows(94)
def test_the_corners_are_met_exactly() -> None:
    rate = LearningRate(0.3, "cosine", 10, 110, floor=0.01)  # type: ignore[arg-type]
    assert (rate(10), rate(110), rate(1000)) == (0.3, 0.01, 0.01)
    assert LearningRate(0.3, "linear", 5, 5, floor=0.1)(5) == 0.1  # type: ignore[arg-type]


@pytest.mark.shows(94)
@pytest.mark.parametrize("ramp", ["linear", "cosine"])
def test_weight_decay_equals_its_closed_form(ramp: str) -> None:
    decay = WeightDecay(0.02, 0.4, ramp, 50)  # type: ignore[arg-type]
    for step in range(1, 80):
        x = min(step / 50, 1.0)
        share = x if ramp == "linear" else math.sin(math.pi * x / 2) ** 2
        assert decay(step) == pytest.approx(0.02 + 0.38 * share, rel=EXACT)
    assert {WeightDecay(0.2)(step) for step in range(1, 50)} == {0.2}


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"peak": 0.0}, "optimizer.learning_rate = 0.0"),
        ({"peak": math.inf}, "optimizer.learning_rate = inf"),
        ({"decay": "cosin"}, 'optimizer.decay = .cosin.: expected "constant", "linear", "cosine" or "inverse-sqrt"'),
        ({"decay": "cosine"}, "step at which it ends"),
        ({"decay": "linear", "num_warmup_steps": 9, "num_decay_steps": 8}, "within its warm-up of 9"),
        ({"num_warmup_steps": -1}, "-1"),
        ({"floor": 2.0}, "optimizer.final_learning_rate = 2.0"),
        ({"initial": -0.1}, "initial"),
    ],
)
def test_learning_rates_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LearningRate(**settings)(1)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"first": -0.1}, "-0.1"),
        ({"ramp": "linear", "last": 0.3}, "needs num_steps"),
        ({"ramp": "linear", "last": 0.3, "num_steps": 0}, "at least 1"),
        ({"ramp": "steep"}, "optimizer.ramp = 'steep': expected"),
    ],
)
def test_weight_decays_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        WeightDecay(**settings)(1)


@pytest.mark.shows(92)
def test_the_scale_doubles_after_two_thousand_good_steps() -> None:
    scaler = LossScaler()
    for step in range(1, 8 * 2000 + 2000):
        scaler.update(True)
        assert scaler.scale == min(2.0 ** (16 + step // 2000), 2.0**24)
    for step in range(1, 30):
        scaler.update(False)
        assert scaler.scale == max(2.0 ** (24 - step), 1.0)


@pytest.mark.shows(96)
def test_a_loaded_scaler_goes_on_as_the_saved_one() -> None:
    one, other = LossScaler(8.0, num_growth_steps=3), LossScaler(1.0, num_growth_steps=3)
    for success in (True, False, True, True):
        one.update(success)
    other.load_state(one.state())
    for success in (True, True, True, True, False):
        one.update(success)
        other.update(success)
        assert one.scale == other.scale
