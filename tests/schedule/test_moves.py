"""R, O and L: which orders of them are proved, what they take in a simulation, and how they are written."""

import random
from dataclasses import replace

import pytest

from penstock import schedule
from penstock.schedule import Action, Costs, Op, Schedule, ScheduleError, Step, lower, parts, simulate, verify
from penstock.schedule.text import parse_step

SHAPES = [("1f1b", 2, 1), ("interleaved", 2, 2), ("zb-v", 2, 2), ("zb-h1", 3, 1), ("combined-1f1b", 2, 1)]


def built(name: str, ranks: int, stages: int, microbatches: int = 4) -> Schedule:
    more = {"stages_per_rank": stages} if stages > 1 else {}
    return schedule.build(name, ranks=ranks, microbatches=microbatches, **more)


def with_some(plain: Schedule, rng: random.Random, num: int) -> Schedule:
    """Some moves of some microbatches, mostly between their forward and backward."""
    orders = [list(order) for order in plain.orders]
    for _ in range(num):
        order = rng.choice(orders)
        about = rng.choice([action for step in order for action in parts(step) if action.op is Op.F])
        ends = [place for place, step in enumerate(order) for a in parts(step) if is_of(a, about)][:2]
        begin, end = (ends[0] + 1, ends[1]) if rng.random() < 0.8 else (0, len(order))
        kinds = rng.choice([[Op.R], [Op.O, Op.L], [Op.O, Op.L, Op.R], [Op.O], [Op.L], [Op.R, Op.R], [Op.L, Op.O]])
        for place, op in reversed(list(zip(sorted(rng.choices(range(begin, end + 1), k=len(kinds))), kinds))):
            order.insert(place, replace(about, op=op, keeps=False))
    return replace(plain, orders=tuple(map(tuple, orders)))


def is_of(action: Action, other: Action) -> bool:
    return (action.stage, action.microbatch) == (other.stage, other.microbatch)


def is_legal(plan: Schedule) -> bool:
    """What a plain walk through each rank's states says."""
    last = plan.placement.stages_per_route - 1
    for order in plan.orders:
        held: dict[tuple[int, int], str] = {}
        for action in (action for step in order for action in parts(step)):
            key = action.stage, action.microbatch
            state = held.get(key, "nothing")
            if action.op is Op.F:
                held[key] = "all" if action.keeps else "input"
            elif action.op is Op.R and (state != "input" or action.stage == last):
                return False
            elif action.op is Op.R:
                held[key] = "all"
            elif action.op is Op.O:
                if state not in ("all", "input"):
                    return False
                held[key] = f"away {state}"
            elif action.op is Op.L:
                if not state.startswith("away "):
                    return False
                held[key] = state.removeprefix("away ")
            elif action.op in (Op.B, Op.I):
                if state not in ("all", "input"):
                    return False
                held[key] = "weights" if action.op is Op.I else "nothing"
            else:
                held[key] = "nothing"
    return True


@pytest.mark.shows(210)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_proof_accepts_what_a_walk_through_the_states_accepts(shape: tuple[str, int, int]) -> None:
    plain, seen = built(*shape), {True: 0, False: 0}
    for draw in range(120):
        rng = random.Random(f"{shape} {draw}")
        plan = with_some(plain, rng, rng.randint(1, 3))
        legal = is_legal(plan)
        seen[legal] += 1
        if legal:
            program = lower(plan)
            verify(program)
            assert schedule.from_text(schedule.to_text(program)) == program
        else:
            with pytest.raises(ScheduleError, match=r"rank \d(, action \d+)?: \d+[BIWROL]\d+ "):
                verify(lower(plan))
    assert min(seen.values()) > 10, seen


def order_of(words: str) -> tuple[Step, ...]:
    return tuple(parse_step(word) for word in words.split())


def alone(words: str) -> schedule.Program:
    plain = built("1f1b", 1, 1, microbatches=2)
    return lower(replace(plain, orders=(order_of(words),), live_bound=None))


@pytest.mark.shows(210)
def test_bytes_are_taken_at_the_start_and_freed_at_the_end() -> None:
    costs = Costs(
        backward_input=2.0, backward_weight=0.0, recompute=1.0, offload=0.5, microbatch_bytes=3.0, kept_bytes=10.0
    )
    timeline = simulate(alone("0F0K 0O0 0F1 0L0 0B0 0B1"), costs)
    # F 0..1 whole; O 1..1.5; F 1..2 lean; L 2..2.5; B of what was kept 2.5..3.5, of what was not 3.5..5.5
    expected = [(0.0, 10.0), (1.0, 13.0), (1.5, 3.0), (2.0, 13.0), (3.5, 3.0), (5.5, 0.0)]
    assert [(time, round(live, 9)) for time, live in timeline.live_bytes(0)] == expected
    assert timeline.peak_live_bytes == pytest.approx((13.0,)) and timeline.makespan == 5.5


@pytest.mark.shows(210)
def test_what_is_moved_waits_for_the_line_and_the_backward_for_what_is_moved() -> None:
    timeline = simulate(alone("0F0 0O0 0F1 0O1 0L0 0B0 0L1 0B1"), Costs(offload=3.0))
    moves = [(str(e.action), e.start, e.end) for e in timeline.events[0] if isinstance(e.action, Action)]
    assert [one for one in moves if one[0][1] in "OL"] == [
        ("0O0", 1.0, 4.0),
        ("0O1", 4.0, 7.0),
        ("0L0", 7.0, 10.0),
        ("0L1", 12.0, 15.0),
    ]
    assert timeline.makespan == 17.0


@pytest.mark.shows(210)
def test_recomputation_ahead_takes_its_time_from_the_backward() -> None:
    plain = built("1f1b", 2, 1)
    costs = Costs(recompute=0.5)
    ahead = list(plain.orders[0])
    ahead.insert(ahead.index(Action(Op.B, 0, 3)), Action(Op.R, 0, 3))
    early = simulate(lower(replace(plain, orders=(tuple(ahead), plain.orders[1]))), costs)
    late = simulate(lower(plain), costs)
    # It fits into the time in which the rank waits for the last gradient.
    assert early.makespan == late.makespan - 0.5
    computed = [sum(e.end - e.start for e in one.events[0]) for one in (early, late)]
    assert computed[0] == computed[1]


@pytest.mark.shows(210)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("0F0 0O0 0B0 0F1 0B1", "0B0 takes a tape that is whole or lean, but 0O0 left it away"),
        ("0F0 0L0 0B0 0F1 0B1", "0L0 takes a tape that is away, but 0F0 left it lean"),
        ("0F0 0B0 0O0 0F1 0B1", "0O0 takes a tape that is whole or lean, but 0B0 left it gone"),
        ("0O0 0F0 0L0 0B0 0F1 0B1", "0O0 waits for 0F0, which comes only at action 2"),
        ("0F0 0R0 0B0 0F1 0B1", "0R0 would compute the loss again"),
    ],
)
def test_a_wrong_move_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        verify(alone(words))


@pytest.mark.shows(210)
def test_torchs_csv_has_no_moves() -> None:
    with pytest.raises(ValueError, match="torch's CSV has no L or O"):
        schedule.to_csv(alone("0F0 0O0 0L0 0B0 0F1 0B1"))
