"""Costs of every kind: times by stage, lengths, pairs, bandwidth, memory; and what a timeline says of them."""

import pytest
from hypothesis import given

from penstock.schedule import (
    Action,
    Costs,
    Op,
    Pair,
    Schedule,
    Timeline,
    lower,
    parts,
    simulate,
)
from penstock.schedule.actions import COMPUTE
from tests.schedule.families import NAMES, lowered, stages_of
from tests.schedule.random_schedules import schedules


def durations(timeline: Timeline) -> dict[str, float]:
    return {str(event.action): event.end - event.start for events in timeline.events for event in events}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_time_for_each_stage_is_one_number(name: str):
    for v in stages_of(name):
        program = lowered(name, 4, 6, v)
        per_rank = program.placement.stages_per_microbatch
        stages = program.placement.stages_per_route
        one = Costs(forward=12 * per_rank, backward_input=24 * per_rank, backward_weight=6 * per_rank, transfer=1)
        each = Costs(forward=(12,) * stages, backward_input=(24,) * stages, backward_weight=(6,) * stages, transfer=1)
        assert simulate(program, one) == simulate(program, each)


def test_stages_and_microbatches_take_their_own_times():
    program = lowered("interleaved-zb", 2, 3, 2)
    costs = Costs(forward=(1, 2, 4, 8), backward_input=3, backward_weight=(5, 5, 5, 7), lengths=(1, 2, 0.5))
    found = durations(simulate(program, costs))
    assert found["0F0"] == 1 and found["3F0"] == 8 and found["3F1"] == 16 and found["2F2"] == 2
    assert found["1I0"] == 1.5 and found["1I2"] == 0.75
    assert found["3W1"] == 14 and found["0W2"] == 2.5


def test_a_message_takes_its_latency_and_its_bytes_share_of_the_bandwidth():
    program = lowered("1f1b", 2, 2)
    costs = Costs(transfer=0.5, message_bytes=600, bandwidth=300, lengths=(1, 2))
    starts = {str(event.action): event.start for events in simulate(program, costs).events for event in events}
    assert starts["1F0"] == 1 + 0.5 + 2
    assert starts["1B0"] == starts["1F0"] + 1
    assert starts["0B0"] == starts["1B0"] + 2 + 0.5 + 2
    assert starts["1F1"] == max(1 + 2 + 0.5 + 4, starts["1B0"] + 2)
    assert simulate(program, Costs(message_bytes=600)) == simulate(program, Costs())


def test_messages_of_a_channel_follow_one_another_and_each_link_has_its_own_bandwidth():
    program = lowered("afab", 3, 4)
    costs = Costs(transfer=0.5, message_bytes=8, bandwidth=(8, 2, 1))
    timeline = simulate(program, costs)
    starts = {str(event.action): event.start for events in timeline.events for event in events}
    # The first link carries a message in the time that it takes to make one, the second in four times as long.
    assert [starts[f"1F{i}"] for i in range(4)] == [2.5, 3.5, 4.5, 5.5]
    assert [starts[f"2F{i}"] for i in range(4)] == [8, 12, 16, 20]
    assert starts["1B0"] == starts["2B0"] + 2 + 4.5
    with pytest.raises(ValueError, match="bandwidth must be one number, or a list of 3"):
        simulate(program, Costs(message_bytes=8, bandwidth=(8, 2)))


def test_a_pair_takes_its_own_time_and_as_long_as_its_halves_if_none_is_given():
    program = lowered("dualpipe-v", 3, 8)
    pairs = [step for steps in program.ranks for step in steps if isinstance(step, Pair)]
    assert pairs
    plain = durations(simulate(program, Costs(2, 4, 6)))
    own = durations(simulate(program, Costs(2, 4, 6, pair=10)))
    lengths = durations(simulate(program, Costs(2, 4, 6, pair=10, lengths=(1, 3, 1, 1, 1, 1, 1, 1))))
    for pair in pairs:
        assert plain[str(pair)] == 6 and own[str(pair)] == 5
        odd = 1 in (pair.forward.microbatch, pair.backward.microbatch)
        assert lengths[str(pair)] == (10 if odd else 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": (1, 2)}, "forward must have one time for each of 3 stages, got 2"),
        ({"pair": (1, 2, 3, 4)}, "pair must have one time for each of 3 stages, got 4"),
        ({"lengths": (1, 2)}, "4 microbatches need as many lengths, got 2"),
        ({"forward": (1, -2, 1)}, "forward must be a time of at least 0, got -2"),
        ({"lengths": (1, 2, 1, float("nan"))}, "lengths must be a number of at least 0, got nan"),
        ({"bandwidth": 1e-308}, "bandwidth must be at least 1e-100 bytes in a unit of time, got 1e-308"),
        ({"transfer": 1e308}, r"transfer must be a time of at most 1e\+100, got 1e\+308"),
        ({"backward_weight": [1, 10**400, 1]}, r"backward_weight must be a time of at most 1e\+100"),
        ({"message_bytes": 1e101}, r"message_bytes must be a number of at most 1e\+100"),
        ({"weight_memory_share": -0.5}, "weight_memory_share must be a number of at least 0, got -0.5"),
        ({"pair": float("inf")}, "pair must be a time of at least 0, got inf"),
    ],
)
def test_costs_that_do_not_fit_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        simulate(lowered("1f1b", 3, 4), Costs(**arguments))


def test_a_microbatch_counts_in_full_until_its_i_and_then_its_share_until_its_w():
    program = lowered("zb-h1", 3, 5)
    result = simulate(program, Costs(weight_memory_share=0.25, microbatch_bytes=100))
    for rank, events in enumerate(result.events):
        for time, live in result.live_microbatches(rank):
            expected = 0.0
            for microbatch in range(5):
                at = {
                    e.action.op: e for e in events if isinstance(e.action, Action) and e.action.microbatch == microbatch
                }
                if at[Op.F].start <= time < at[Op.I].end:
                    expected += 1
                elif at[Op.I].end <= time < at[Op.W].end:
                    expected += 0.25
            assert live == expected
        assert max(live for _, live in result.live_microbatches(rank)) == result.peak_live_microbatches[rank]
        assert result.live_bytes(rank) == tuple((time, 100 * live) for time, live in result.live_microbatches(rank))
    whole = simulate(program, Costs())
    assert whole.peak_live_microbatches == (3, 3, 3)
    assert all(less < more for less, more in zip(result.peak_live_microbatches[1:], whole.peak_live_microbatches[1:]))


def test_bytes_follow_the_lengths():
    lengths = (1, 0.5, 3, 2)
    result = simulate(lowered("afab", 2, 4), Costs(microbatch_bytes=10, lengths=lengths))
    assert result.peak_live_bytes == (65, 65)
    assert result.peak_live_microbatches == (4, 4)
    assert [live for _, live in result.live_bytes(0)][:4] == [10, 15, 45, 65]


@given(schedules())
def test_live_tapes_over_time_begin_and_end_with_none(schedule: Schedule):
    result = simulate(lower(schedule), Costs(forward=12, backward_input=6, backward_weight=18, transfer=1))
    for rank, events in enumerate(result.events):
        live = result.live_microbatches(rank)
        if not any(parts(event.action)[0].op in COMPUTE for event in events):
            assert live == ()
            continue
        assert live[-1][1] == 0
        assert max(count for _, count in live) == pytest.approx(result.peak_live_microbatches[rank])
        assert [time for time, _ in live] == sorted({time for time, _ in live})


def test_each_link_takes_its_own_time_in_both_directions():
    program = lowered("1f1b", 4, 1)
    starts = {
        str(e.action): e.start for events in simulate(program, Costs(transfer=(0, 7, 0, 99))).events for e in events
    }
    assert starts["1F0"] == 1 and starts["2F0"] == 9 and starts["3F0"] == 10
    assert starts["2B0"] == 13 and starts["1B0"] == 22 and starts["0B0"] == 24


def test_the_last_link_joins_the_last_rank_and_the_first():
    program, costs = lowered("interleaved", 3, 1, 2), Costs(forward=2, transfer=(0, 0, 5))
    starts = {str(e.action): e.start for events in simulate(program, costs).events for e in events}
    assert starts["2F0"] == 2 and starts["3F0"] == 8


def test_every_compute_action_takes_its_constant_besides():
    plain, longer = (simulate(lowered("zb-h1", 2, 3), Costs(action=action)) for action in (0, 0.25))
    found, before = durations(longer), durations(plain)
    assert found["0I1"] == before["0I1"] + 0.25 and found["1W2"] == before["1W2"] + 0.25
    assert durations(simulate(lowered("1f1b", 2, 3), Costs(action=0.25)))["0B1"] == 2.25
    pair = next(key for key in durations(simulate(lowered("dualpipe-v", 2, 4, 2), Costs())) if "OVERLAP" in key)
    assert durations(simulate(lowered("dualpipe-v", 2, 4, 2), Costs(action=0.25)))[pair] == 2.0
    assert durations(simulate(lowered("dualpipe-v", 2, 4, 2), Costs(action=0.25, pair=2.0)))[pair] == 1.25
