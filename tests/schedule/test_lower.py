"""What lowering adds to a schedule, for the builders and for schedules drawn at random."""

from collections import Counter, defaultdict
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import (
    Action,
    Channel,
    Op,
    Placement,
    PlacementKind,
    Program,
    Rules,
    Schedule,
    ScheduleError,
    build,
    from_text,
    lower,
    partner,
    parts,
    to_text,
    verify,
)
from penstock.schedule.actions import COMPUTE, RECEIVES, SENDS, flatten
from penstock.schedule.choice import ScheduleChoice
from penstock.settings import ScheduleConfig
from tests.schedule.families import NAMES, lowered, stages_of
from tests.schedule.random_schedules import schedules

SIZES = [(1, 1), (1, 5), (2, 1), (2, 6), (3, 2), (4, 1), (4, 9), (5, 5), (8, 2), (8, 17)]
every_name = pytest.mark.parametrize("name", NAMES)


def grid(name: str) -> list[tuple[int, int, int]]:
    """Ranks, microbatches and stages a rank."""
    return [(*size, stages) for size in SIZES for stages in (stages_of(name)[0], stages_of(name)[-1])]


@given(schedules(), st.integers(1, 4))
def test_compute_keeps_its_order(schedule: Schedule, receives_ahead: int):
    before = to_text(schedule)
    program = lower(schedule, receives_ahead=receives_ahead)
    assert to_text(schedule) == before
    assert program.schedule is schedule
    for order, steps in zip(schedule.orders, program.ranks, strict=True):
        assert order == tuple(step for step in steps if parts(step)[0].op in COMPUTE)


@settings(max_examples=150)
@given(schedules(max_ranks=6, max_microbatches=8), st.sampled_from((1, 2, 3, 10_000)))
def test_no_legal_schedule_deadlocks_however_few_receives_are_asked_for(schedule: Schedule, receives_ahead: int):
    proof = verify(lower(schedule, receives_ahead=receives_ahead))
    assert proof.num_actions >= sum(len(order) for order in schedule.orders)


@given(schedules(max_ranks=4, max_microbatches=6), st.integers(1, 3))
def test_with_shared_channels_all_that_two_ranks_exchange_has_one_order(schedule: Schedule, receives_ahead: int):
    program = lower(schedule, receives_ahead=receives_ahead, shared_channels=True)
    assert verify(program).num_actions == verify(lower(schedule)).num_actions
    rank_of = program.placement.rank_of
    sent, received = defaultdict(list), defaultdict(list)
    for rank, steps in enumerate(program.ranks):
        for action in flatten(steps):
            if action.op in SENDS:
                meets = partner(action)
                sent[rank, rank_of(meets.stage)].append(meets)
            elif action.op in RECEIVES:
                received[rank_of(partner(action).stage), rank].append(action)
    assert sent == received


def open_receives(program: Program) -> dict[Channel, int]:
    """The most receives that are open on each channel at once."""
    rules = Rules(program.schedule)
    peaks: dict[Channel, int] = {}
    for rank, steps in enumerate(program.ranks):
        num_open: Counter = Counter()
        for action in flatten(steps):
            channel = rules.of_rank[rank][action.op][action.stage].channel
            if channel is not None and action.op not in SENDS:
                num_open[channel] += 1 if action.op in RECEIVES else -1
                assert num_open[channel] >= 0
                peaks[channel] = max(peaks.get(channel, 0), num_open[channel])
        assert not any(num_open.values())
    return peaks


def test_an_order_that_sends_far_ahead_gets_the_receives_it_takes():
    """Breadth first, the last rank has the first one's next inputs while that one still computes its earlier stage."""
    for ranks in (2, 4, 8):
        for microbatches in (ranks, 40):
            peaks = open_receives(lowered("looped-bfs", ranks, microbatches, 2))
            assert (max(peaks.values()) > 2) == (microbatches > ranks)
            # All ranks together hold what the first is behind.
            assert sum(peak - 2 for peak in peaks.values() if peak > 2) <= 2 * (microbatches - ranks)


@given(schedules(), st.integers(1, 4))
def test_whoever_computes_has_posted_what_was_asked_for(schedule: Schedule, receives_ahead: int):
    program = lower(schedule, receives_ahead=receives_ahead)
    rules = Rules(schedule)
    for rank, steps in enumerate(program.ranks):
        num_open: Counter = Counter()
        outstanding = Counter(
            rules.of_rank[rank][action.op][action.stage].channel for action in flatten(steps) if action.op in RECEIVES
        )
        for step in steps:
            if parts(step)[0].op in COMPUTE:
                # Sends came before, for others wait for them; but all receives that may be open are, while it computes.
                assert all(
                    num_open[line] >= min(receives_ahead, num_open[line] + outstanding[line]) for line in outstanding
                )
            for action in parts(step):
                channel = rules.of_rank[rank][action.op][action.stage].channel
                if channel is None or action.op in SENDS:
                    continue
                if action.op in RECEIVES:
                    num_open[channel] += 1
                    outstanding[channel] -= 1
                else:
                    num_open[channel] -= 1
        assert not any(num_open.values())


@every_name
def test_builders_never_need_more_open_receives_than_asked_for(name: str):
    for size in grid(name):
        for receives_ahead in (1, 2, 3):
            peaks = open_receives(lowered(name, *size, receives_ahead))
            # See above for the one schedule that does.
            assert name == "looped-bfs" or max(peaks.values(), default=0) <= receives_ahead


@every_name
def test_a_send_stands_right_behind_its_compute(name: str):
    producer = {Op.SEND_F: (Op.F,), Op.SEND_B: (Op.B, Op.I)}
    for size in grid(name):
        program, num_sends = lowered(name, *size), 0
        for steps in program.ranks:
            made: set[tuple[Op, int, int]] = set()
            # What may stand between them: other transfers, and the other half of a pair.
            for step in steps:
                actions = parts(step)
                if actions[0].op in producer:
                    assert any((op, actions[0].stage, actions[0].microbatch) in made for op in producer[actions[0].op])
                    num_sends += 1
                elif actions[0].op not in RECEIVES:
                    made = {(action.op, action.stage, action.microbatch) for action in actions}
        assert num_sends == verify(program).num_messages


@pytest.mark.shows(30, 31, 32)
@every_name
def test_a_gradient_is_reduced_once_right_behind_its_last_writer(name: str):
    for ranks, microbatches, stages_per_rank in grid(name):
        program = lowered(name, ranks, microbatches, stages_per_rank)
        for rank, steps in enumerate(program.ranks):
            rest = [action for action in flatten(steps) if action.op not in SENDS | RECEIVES]
            reduced = [action.stage for action in rest if action.op is Op.REDUCE_GRAD]
            if not program.schedule.training:
                assert not reduced and Action(Op.STEP) not in rest
                continue
            assert sorted(reduced) == sorted(program.placement.stages_of(rank))
            for stage in reduced:
                at = rest.index(Action(Op.REDUCE_GRAD, stage))
                if due := program.schedule.microbatches_of(stage):
                    assert rest[at - 1].op in (Op.B, Op.W)
                    assert rest[at - 1] == Action(rest[at - 1].op, stage, due[-1])
            assert rest[-1] == Action(Op.STEP) and rest.count(Action(Op.STEP)) == 1


@pytest.mark.shows(31)
def test_reductions_of_several_stages_lie_between_the_compute_of_others():
    for name, num_behind in (("interleaved", 8), ("looped-bfs", 16), ("interleaved-zb", 8)):
        for steps in lowered(name, 4, 16, 2).ranks:
            early = steps.index(Action(Op.REDUCE_GRAD, max(s.stage for s in steps if isinstance(s, Action))))
            computed = [step for step in steps[early:] if parts(step)[0].op in COMPUTE]
            assert len(computed) >= min(4, num_behind)


def test_neighbours_on_one_rank_hand_over_without_a_message():
    placement = Placement(PlacementKind.V, num_ranks=2, stages_per_rank=2)
    orders = (
        tuple(Action(*word) for word in ((Op.F, 0, 0), (Op.F, 3, 0), (Op.B, 3, 0), (Op.B, 0, 0))),
        tuple(Action(*word) for word in ((Op.F, 1, 0), (Op.F, 2, 0), (Op.B, 2, 0), (Op.B, 1, 0))),
    )
    program = lower(Schedule("v", placement, 1, orders))
    assert verify(program).num_messages == 4
    transfers = [str(action) for action in flatten(program.ranks[1]) if action.op in SENDS | RECEIVES]
    assert sorted(transfers) == ["1RECV_F0", "1SEND_B0", "2RECV_B0", "2SEND_F0"]


def test_a_needed_receive_deep_in_the_channel_is_posted_with_those_before_it():
    text = """penstock schedule 1
name: backwards
placement: loop
ranks: 2
stages_per_rank: 1
microbatches: 3
training: no
live_bound: none
rank 0: 0F0 0F1 0F2
rank 1: 1F2 1F1 1F0
"""
    schedule = from_text(text)
    assert isinstance(schedule, Schedule)
    words = " ".join(map(str, lower(schedule, receives_ahead=1).ranks[1]))
    assert words == "1RECV_F0 1RECV_F1 1RECV_F2 1F2 1F1 1F0"


def test_a_receive_that_is_needed_early_leaves_no_more_of_them_open_afterwards():
    taken = ((0, 1, 2, 3), (1, 0, 2, 3))
    orders = tuple(tuple(Action(Op.F, stage, number) for number in order) for stage, order in enumerate(taken))
    schedule = Schedule("turned", Placement(PlacementKind.LOOP, 2), 4, orders, training=False)
    words = " ".join(map(str, lower(schedule, receives_ahead=1).ranks[1]))
    assert words == "1RECV_F0 1RECV_F1 1F1 1F0 1RECV_F2 1F2 1RECV_F3 1F3"


@settings(max_examples=30)
@given(schedules(), st.randoms(use_true_random=False))
def test_an_incomplete_schedule_is_refused_and_nothing_worse(schedule: Schedule, chance):
    rank = chance.choice([rank for rank, order in enumerate(schedule.orders) if order])
    order = list(schedule.orders[rank])
    del order[chance.randrange(len(order))]
    orders = tuple(tuple(order) if at == rank else other for at, other in enumerate(schedule.orders))
    broken = Schedule("broken", schedule.placement, schedule.num_microbatches, orders, training=schedule.training)
    with pytest.raises(ScheduleError, match="rank"):
        verify(lower(broken))


def test_an_action_that_has_no_place_is_refused():
    placement = Placement(PlacementKind.LOOP, 2)
    stray = Schedule("stray", placement, 1, ((Action(Op.F, 0, 0),), (Action(Op.F, 7, 0),)))
    with pytest.raises(ScheduleError, match=r"rank 1: 7F0 does not belong here"):
        lower(stray)
    with pytest.raises(ValueError, match="receives_ahead must be a whole number of at least 1, got 0"):
        lower(build("afab", ranks=2, microbatches=2), receives_ahead=0)


def test_forwards_alone_post_as_many_receives_ahead_as_a_step() -> None:
    def posted_at_first(receives_ahead: int) -> int:
        choice = ScheduleChoice(ScheduleConfig("1f1b", receives_ahead=receives_ahead))
        [_, steps] = choice.forwards(choice.placement(2), 6).ranks
        return sum(1 for _ in takewhile(lambda step: isinstance(step, Action) and step.op is Op.RECV_F, steps))

    assert [posted_at_first(ahead) for ahead in (1, 2, 5)] == [1, 2, 5]
