"""Wrong arguments for functions of `penstock.schedule`: one sentence names the argument, and what would be possible."""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import pytest

from penstock import schedule
from penstock.schedule import Action, Costs, Op, Pair, Placement, Program, Schedule
from penstock.settings import OptimizerConfig, ScheduleConfig
from penstock.settings.declare import check_argument, checked

ORDER = schedule.build("1f1b", ranks=2, microbatches=2)
PROGRAM = schedule.lower(ORDER)
ALONE = Placement("loop", 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: schedule.build("1f1b", ranks="4", microbatches=2), "ranks = '4': expected int, got str"),
        (lambda: schedule.build("1f1b", ranks=2, microbatches=None), "microbatches = None: expected int"),
        (lambda: schedule.build("1f1b", ranks=True, microbatches=2), "ranks = True: expected int, got bool"),
        (lambda: schedule.build("auto", ranks=2, microbatches=2, effort="x"), "effort = 'x': expected float, got str"),
        (
            lambda: schedule.build("auto", ranks=2, microbatches=2, forward=None),
            "forward = None: expected float or list[float]",
        ),
        (lambda: schedule.lower(PROGRAM), "schedule: expected Schedule, got Program"),
        (lambda: schedule.lower(ORDER, receives_ahead="2"), "receives_ahead = '2': expected int, got str"),
        (lambda: schedule.lower(ORDER, receives=2), "lower has no 'receives'; the nearest one is 'receives_ahead'"),
        (lambda: schedule.verify(ORDER), "program: expected Program, got Schedule"),
        (lambda: schedule.simulate("1f1b"), "program = '1f1b': expected Program or Hang, got str"),
        (
            lambda: schedule.simulate(PROGRAM, {"forward": 1}),
            "costs = {'forward': 1}: expected Costs or None, got dict",
        ),
        (lambda: schedule.early_gradients(5), "schedule = 5: expected Schedule, got int"),
        (lambda: schedule.register(None, lambda ranks, microbatches: ORDER), "name = None: expected str"),
        (lambda: schedule.register("mine", 5), "build = 5: expected function, got int"),
        (lambda: schedule.partition(["a", 1.0], 1), "times[0] = 'a': expected float, got str"),
        (lambda: schedule.partition("ab", 1), "times = 'ab': expected list[float], got str"),
        (lambda: schedule.partition({1: 2}, 1), "times = {1: 2}: expected list[float], got dict"),
        (lambda: schedule.check_cut([1, 2], "3", 2), "num_units = '3': expected int, got str"),
        (lambda: schedule.balanced_cut([1.0, 2.0], 2), "placement = 2: expected Placement, got int"),
        (lambda: schedule.costs_of_cut(None, ()), "units = None: expected Costs"),
        (lambda: schedule.from_text(b"x"), "text = b'x': expected str, got bytes"),
        (lambda: schedule.from_csv(["0F0"]), "text = ['0F0']: expected str, got list"),
        (lambda: schedule.to_csv("x"), "plan = 'x': expected Schedule or Program, got str"),
        (lambda: Costs(forward="x"), "forward = 'x': expected float or list[float], got str"),
        (lambda: Costs(forward=[1.0, None]), "forward[1] = None: expected float"),
        (lambda: Costs(lengths=5), "lengths = 5: expected list[float], got int"),
        (lambda: Costs(bandwidth="x"), "bandwidth = 'x': expected float or list[float] or None, got str"),
        (lambda: Costs(forwrd=1), "Costs has no 'forwrd'; the nearest one is 'forward'"),
        (lambda: Schedule("n", None, 1, ()), "placement = None: expected Placement"),
        (lambda: Schedule("n", ALONE, 1, None), "orders = None: expected list"),
        (lambda: Schedule("n", ALONE, 1, ((5,),)), "rank 0 has the step 5; steps are Actions, with an Op, and Pairs"),
        (lambda: Schedule("n", ALONE, 1, ((Action("F", 0, 0),),)), "steps are Actions, with an Op, and Pairs"),
        (lambda: Pair(None, Action(Op.B, 0, 0)), "a pair is an F with a B or an I, not None with 0B0"),
        (lambda: Program(None, ()), "schedule = None: expected Schedule"),
        (lambda: schedule.Rules("x"), "schedule = 'x': expected Schedule, got str"),
        (lambda: OptimizerConfig(weihgt=1), "OptimizerConfig has no 'weihgt'; the nearest one is 'weight_decay'"),
        (lambda: ScheduleConfig(nmae="1f1b"), "ScheduleConfig has no 'nmae'; the nearest one is 'name'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_possible(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)


@checked
def scaled(
    numbers: list[float], factor: float = 2.0, *, names: dict[str, int] | None = None, **more: int
) -> list[float]:
    return [factor * number for number in numbers]


def test_right_arguments_pass_and_python_says_what_is_missing() -> None:
    assert scaled([1, 2.5], factor=1, names={"a": 1}, other=3) == [1, 2.5]
    assert schedule.partition((1.0, 2.0), 2) == (range(1), range(1, 2))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'numbers'"):
        scaled()
    # A list of any length is quoted in part.
    with pytest.raises(ValueError) as caught:
        check_argument("x", list(range(1000)), str)
    assert len(str(caught.value)) < 100
