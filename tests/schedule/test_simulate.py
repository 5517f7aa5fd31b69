"""The simulation against closed forms, published tables and an independent calculation."""

import itertools
from typing import Any, cast

import pytest
from hypothesis import given, settings

from penstock.schedule import (
    Action,
    Costs,
    Event,
    Op,
    Program,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    lower,
    parts,
    simulate,
    verify,
)
from penstock.schedule.actions import COMPUTE, RECEIVES, SENDS
from tests.schedule.random_schedules import schedules

GRID = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in (1, 2, 3, 5, 8, 13, 25)]


def timeline(
    name: str, ranks: int, microbatches: int, costs: Costs | None = None, stages_per_rank: int = 1
) -> Timeline:
    schedule = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return simulate(lower(schedule), costs)


@pytest.mark.shows(2, 3, 100)
@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_the_bubble_of_afab_and_1f1b(name: str):
    # Whole numbers are added without rounding, so that the closed forms hold exactly.
    costs = Costs(forward=2, backward_input=3, backward_weight=1)
    for p, m in GRID:
        result = timeline(name, p, m, costs)
        assert result.makespan == result.span_cost == (m + p - 1) * 6
        assert result.bubble_rate == (p - 1) * 6 / ((m + p - 1) * 6)
        assert result.idle == ((p - 1) * 6,) * p
        live = {"afab": [m] * p, "1f1b": [min(p - stage, m) for stage in range(p)]}[name]
        assert list(result.peak_live_microbatches) == live


@pytest.mark.shows(5)
def test_inference_brings_microbatch_m_to_stage_s_at_step_m_plus_s():
    for p, m in GRID:
        result = timeline("inference", p, m)
        assert result.makespan == m + p - 1
        assert result.span_cost == m and result.bubble_rate == 0
        for stage, events in enumerate(result.events):
            assert [(event.action, event.start) for event in events] == [
                (Action(Op.F, stage, number), number + stage) for number in range(m)
            ]
        assert result.peak_live_microbatches == (1,) * p


def reference_ends(program: Program, costs: Costs) -> dict[Action, float]:
    """The end of every compute action, by raising all ends until no dependency asks for more."""
    placement, training = program.placement, program.schedule.training
    share = placement.stages_per_microbatch
    given: dict[str, Any] = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    times = {op: time / share for op, time in given.items()} | {"B": (given["I"] + given["W"]) / share}
    assert isinstance(costs.transfer, float | int)
    backward = {}
    for steps in program.ranks if training else ():
        for action in (action for step in steps for action in parts(step)):
            if action.op in (Op.B, Op.I):
                backward[action.stage, action.microbatch] = action
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for _ in range(sum(map(len, program.ranks)) + 1):
        before = dict(ends)
        for rank, steps in enumerate(program.ranks):
            now = 0.0
            for step in steps:
                for action in parts(step):
                    other = None
                    if action.op is Op.F and (stage := placement.previous(action.stage)) is not None:
                        other = Action(Op.F, stage, action.microbatch)
                    if action.op in (Op.B, Op.I) and (stage := placement.next(action.stage)) is not None:
                        other = backward[stage, action.microbatch]
                    if other is not None:
                        # What comes out of a pair comes out at the pair's end, so ask for the end of the step.
                        afar = placement.rank_of(other.stage) != rank
                        now = max(now, ends.get(other, 0.0) + (costs.transfer if afar else 0.0))
                if parts(step)[0].op in COMPUTE:
                    end = now + sum(times[action.op.name] for action in parts(step))
                    for action in parts(step):
                        starts[action], ends[action] = now, end
                    now = end
        if ends == before:
            return ends
    raise AssertionError("the ends keep growing")


@settings(max_examples=60)
@given(schedules())
def test_the_simulation_equals_a_calculation_by_relaxation(schedule: Schedule):
    program = lower(schedule, receives_ahead=1000)
    # Divisible by the number of stages on a rank, and whole, so that nothing is rounded.
    costs = Costs(forward=12, backward_input=18, backward_weight=6, transfer=5)
    result = simulate(program, costs)
    ends = {action: event.end for rank in result.events for event in rank for action in parts(event.action)}
    reference = reference_ends(program, costs)
    assert reference and {action: end for action, end in ends.items() if action.op in COMPUTE} == reference


@given(schedules())
def test_a_timeline_holds_each_action_once_in_order(schedule: Schedule):
    program = lower(schedule, receives_ahead=1000)
    result = simulate(program, Costs(1, 1, 1, transfer=1, reduce=1, step=1))
    for steps, events in zip(program.ranks, result.events, strict=True):
        shown = [step for step in steps if parts(step)[0].op not in SENDS | RECEIVES]
        assert [event.action for event in events] == shown
        compute = [event for event in events if parts(event.action)[0].op in COMPUTE | {Op.STEP}]
        assert all(before.end <= after.start for before, after in itertools.pairwise(compute))
    peaks = verify(program).peak_live_tapes
    assert result.peak_live_microbatches == tuple(peak / schedule.placement.stages_per_microbatch for peak in peaks)
    assert result.makespan == max(event.end for events in result.events for event in events)
    assert result.makespan >= result.span_cost >= 0 and min(result.idle) >= 0


def test_a_reduction_runs_beside_compute_and_the_step_waits_for_it():
    result = timeline("afab", 1, 2, Costs(4, 4, 4, reduce=20, step=3), stages_per_rank=2)
    (events,) = result.events
    found = {str(event.action): (event.start, event.end) for event in events}
    assert found["1B1"][1] == found["1REDUCE_GRAD"][0] == 20
    assert found["0B1"] == (20, 24)
    assert found["0REDUCE_GRAD"] == (40, 60)
    assert found["STEP"] == (60, 63) and result.makespan == 63
    assert result.idle == (63 - 24 - 3,)


def test_a_measured_timeline_is_made_of_events_alone():
    simulated = timeline("1f1b", 4, 6, Costs(1, 1, 1, transfer=0.25))
    measured = Timeline.from_events(simulated.events, title="measured")
    assert measured.bubble_rate == simulated.bubble_rate > 0
    assert measured.idle == simulated.idle
    assert measured.peak_live_microbatches == (4, 3, 2, 1)
    assert measured.title == "measured" and "1f1b" in simulated.title
    late = Timeline.from_events([[Event(Action(Op.F, 0, 0), 2.0, 3.0)], [Event(Action(Op.F, 1, 0), 3.5, 4.5)]])
    assert (late.makespan, late.span_cost, late.bubble_rate, late.idle) == (4.5, 1.0, 0.0, (3.5, 3.5))
    nothing = Timeline.from_events([[], []])
    assert (nothing.makespan, nothing.bubble_rate, nothing.idle) == (0.0, 0.0, (0.0, 0.0))


@pytest.mark.parametrize("cost", ["forward", "backward_input", "backward_weight", "transfer", "reduce", "step"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(cost: str, value: float):
    with pytest.raises(ValueError, match=f"{cost} must be a time of at least 0, got {value}"):
        Costs(**cast(Any, {cost: value}))


def test_a_program_that_cannot_end_is_refused():
    program = lower(build("1f1b", ranks=2, microbatches=1))
    first = tuple(step for step in program.ranks[0] if step != Action(Op.SEND_F, 0, 0))
    with pytest.raises(ScheduleError, match="rank 1 waits forever for 1RECV_F0"):
        simulate(Program(program.schedule, (first, program.ranks[1])))
