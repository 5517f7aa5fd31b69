"""Gradients that leave before the weights' gradients are computed."""

from itertools import product

import pytest

from penstock.schedule import Action, Costs, Op, Pair, Step, early_gradients, lower, simulate, verify
from tests.schedule.families import NAMES, built

COSTS = Costs(forward=2.0, backward_input=3.0, backward_weight=1.5, transfer=0.25)
TRAINING = [name for name in NAMES if built(name, 2, 4).training]


@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_stays_proved_and_is_never_slower(name: str) -> None:
    for ranks, microbatches in product((1, 2, 4), (1, 5, 12)):
        whole = built(name, ranks, microbatches)
        early = early_gradients(whole)
        before, after = lower(whole), lower(early)
        verify(before)
        verify(after)
        slow, fast = simulate(before, COSTS), simulate(after, COSTS)
        assert fast.makespan <= slow.makespan + 1e-9, (ranks, microbatches)
        assert fast.peak_live_microbatches == slow.peak_live_microbatches


@pytest.mark.parametrize("name", TRAINING)
def test_only_backwards_whose_gradient_leaves_the_rank_are_opened(name: str) -> None:
    whole = built(name, 4, 8)
    for rank, (before, after) in enumerate(zip(whole.orders, early_gradients(whole).orders, strict=True)):
        opened: list[Step] = []
        for step in before:
            if not isinstance(step, Pair) and step.op is Op.B and whole.placement.previous(step.stage) is not None:
                taker = whole.placement.rank_of(step.stage - 1)
                opened += [Action(Op.I, step.stage, step.microbatch), Action(Op.W, step.stage, step.microbatch)]
                if taker == rank:
                    opened[-2:] = [step]
            else:
                opened.append(step)
        assert list(after) == opened


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 4), (4, 16), (8, 24)])
def test_1f1b_waits_for_a_weight_gradient_less_on_every_rank_but_the_first(ranks: int, microbatches: int) -> None:
    f, i, w = 1.0, 1.25, 0.5
    costs = Costs(forward=f, backward_input=i, backward_weight=w)
    early = simulate(lower(early_gradients(built("1f1b", ranks, microbatches))), costs)
    assert early.makespan == pytest.approx(microbatches * (f + i + w) + (ranks - 1) * (f + i), rel=1e-12)
