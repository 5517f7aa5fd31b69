"""Recovery on a rank that is alone; `tests/dist/test_failing_steps.py` tries it on several."""

import pytest
import torch

from penstock.runtime import Recorder, Recovery
from penstock.runtime.recovery import StepState
from penstock.schedule import Action, Op


class Counted(StepState):
    """State that counts how often it is saved and restored."""

    num_saved = num_restored = 0

    def save(self) -> None:
        self.num_saved += 1

    def restore(self) -> None:
        self.num_restored += 1


def test_an_action_that_has_failed_is_over_for_the_watchdog_and_still_named() -> None:
    recorder, state = Recorder(0), Counted((), torch.device("cpu"))
    recovery = Recovery(None, recorder, state)
    with pytest.raises(ArithmeticError), recovery.joined(), recovery.announcing():
        recorder.begin(Action(Op.F, 0, 3))
        assert recorder.busy_since_s() > 0
        raise ArithmeticError
    assert (state.num_saved, state.num_restored) == (1, 1)
    assert recorder.busy_since_s() == 0
    assert "in 0F3 for" in recorder.where()
    recorder.begin(Action(Op.F, 0, 4))
    assert recorder.busy_since_s() > 0
