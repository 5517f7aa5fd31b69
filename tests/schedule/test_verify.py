"""The proof: what it refuses and says, and that it errs on neither side when programs are damaged."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import (
    Action,
    Op,
    Pair,
    Placement,
    PlacementKind,
    Program,
    Schedule,
    ScheduleError,
    Step,
    build,
    from_csv,
    from_text,
    lower,
    to_text,
    verify,
)
from tests.covering import EVERY
from tests.schedule.brute_force import BruteForce, harm_of
from tests.schedule.families import NAMES as SCHEDULES
from tests.schedule.random_schedules import legal_schedule, schedules


def accepted(program: Program) -> bool:
    try:
        verify(program)
    except ScheduleError as error:
        assert "rank" in str(error)
        return False
    return True


def replaced(program: Program, rank: int, steps: list[Step]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = tuple(steps)
    return Program(program.schedule, tuple(ranks))


def losses(program: Program) -> Iterator[Program]:
    """The program without one of its steps, or with one twice: next to each other, or once more at either end."""
    for rank, steps in enumerate(program.ranks):
        for at, step in enumerate(steps):
            yield replaced(program, rank, [*steps[:at], *steps[at + 1 :]])
            yield replaced(program, rank, [*steps[:at], step, *steps[at:]])
            yield replaced(program, rank, [step, *steps])
            yield replaced(program, rank, [*steps, step])


def swaps(program: Program) -> Iterator[Program]:
    """The program with any two steps of one rank exchanged."""
    for rank, steps in enumerate(program.ranks):
        for one, other in itertools.combinations(range(len(steps)), 2):
            changed = list(steps)
            changed[one], changed[other] = changed[other], changed[one]
            yield replaced(program, rank, changed)


def small_programs() -> list[Program]:
    """Every builder small; several stages a rank; split backwards and pairs in every placement."""
    sizes = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2))
    chance = random.Random(1)
    built = [build(name, ranks=p, microbatches=m) for name in ("afab", "1f1b", "inference") for p, m in sizes]
    built += [build(name, ranks=2, microbatches=2, stages_per_rank=2) for name in ("afab", "inference")]
    built += [build(name, ranks=2, microbatches=3) for name in SCHEDULES if name not in ("afab", "1f1b", "inference")]
    homes = {PlacementKind.MAP: (1, 0, 1)}
    built += [legal_schedule(Placement(kind, 2, 2, homes.get(kind, ())), 2, True, chance) for kind in PlacementKind]
    assert any(isinstance(step, Pair) for schedule in built for order in schedule.orders for step in order)
    # By turns one receive ahead and two, unless every case is run.
    aheads = [(1, 2) if EVERY else (1 + number % 2,) for number in range(len(built))]
    pairs = [(schedule, ahead) for schedule, own in zip(built, aheads, strict=True) for ahead in own]
    programs = [lower(schedule, receives_ahead=ahead) for schedule, ahead in pairs]
    return [program for program in programs if harm_of(program) is None]


SMALL = small_programs()
NAMES = [
    f"{p.schedule.name}-{p.placement.kind.value}-{p.placement.num_ranks}x{p.placement.stages_per_rank}-{number}"
    for number, p in enumerate(SMALL)
]
every_small = pytest.mark.parametrize("program", SMALL, ids=NAMES)


@every_small
def test_no_action_can_be_lost_or_repeated(program: Program):
    assert accepted(program)
    num_damaged = 0
    for damaged in losses(program):
        assert not accepted(damaged)
        assert harm_of(damaged) is not None
        num_damaged += 1
    assert num_damaged == 4 * sum(map(len, program.ranks)) > 0


@every_small
def test_exactly_the_harmless_swaps_are_accepted(program: Program):
    for damaged in swaps(program):
        harm = harm_of(damaged)
        assert accepted(damaged) == (harm is None), (harm, to_text(damaged))


@settings(max_examples=150)
@given(schedules(max_ranks=6, max_microbatches=8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_damage_to_larger_programs_is_judged_as_a_run_would(schedule: Schedule, receives_ahead: int, chance):
    program = lower(schedule, receives_ahead=receives_ahead)
    assert accepted(program) == (harm_of(program) is None)
    for _ in range(10):
        rank = chance.choice([rank for rank, steps in enumerate(program.ranks) if steps])
        steps = list(program.ranks[rank])
        one, other = chance.randrange(len(steps)), chance.randrange(len(steps))
        match chance.choice(("drop", "repeat", "swap", "move")):
            case "drop":
                del steps[one]
            case "repeat":
                steps.insert(other, steps[one])
            case "swap":
                steps[one], steps[other] = steps[other], steps[one]
            case "move":
                steps.insert(other, steps.pop(one))
        damaged = replaced(program, rank, steps)
        assert accepted(damaged) == (harm_of(damaged) is None)


@given(schedules(max_ranks=5, max_microbatches=6))
def test_the_peak_of_live_tapes_is_that_of_a_run(schedule: Schedule):
    program = lower(schedule, receives_ahead=1000)
    assert verify(program).peak_live_tapes == BruteForce(program).run()


def test_a_bound_on_live_tapes_is_held():
    schedule = build("afab", ranks=2, microbatches=3)
    tight = Schedule("tight", schedule.placement, 3, schedule.orders, live_bound=(3, 2))
    with pytest.raises(ScheduleError, match="rank 1: 3 tapes are live at once, tight promises at most 2"):
        verify(lower(tight))


# A whole program on two ranks with two stages each around the four transfers of torch's known-bad pair. All other
# receives are early enough: with the second rank's pair exchanged, it ends.
BAD_PAIR = """0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2RECV_B1,2B0,2SEND_B0,2B1,\
2SEND_B1,2REDUCE_GRAD,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3RECV_F1,3F0,3B0,3SEND_B0,3F1,3B1,3SEND_B1,3REDUCE_GRAD,\
1RECV_B0,1RECV_B1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD
"""


@pytest.mark.shows(1)
def test_the_pair_that_torch_accepts_is_refused_with_both_ranks_actions_and_reasons():
    program = from_csv(BAD_PAIR)
    assert isinstance(program, Program)
    with pytest.raises(ScheduleError) as caught:
        verify(program)
    assert str(caught.value) == (
        "deadlock, if sends wait for their receives: "
        "rank 0 at 0SEND_F1 waits until rank 1 posts 1RECV_F1; rank 1 at 1SEND_F0 waits until rank 0 posts 2RECV_F0"
    )
    first, second = BAD_PAIR.splitlines()
    mended = from_csv(f"{first}\n{second.replace('1SEND_F0,1RECV_F1', '1RECV_F1,1SEND_F0')}\n")
    assert isinstance(mended, Program)
    assert verify(mended).num_messages == 12


def test_a_deadlock_is_named_also_in_a_fragment():
    """The four transfers alone: much is missing, but that is not all that is wrong with them."""
    fragment = from_csv("0SEND_F1,2RECV_F0\n1SEND_F0,1RECV_F1,3RECV_F0\n")
    assert isinstance(fragment, Program)
    with pytest.raises(ScheduleError) as caught:
        verify(fragment)
    message = str(caught.value)
    assert message.startswith("rank 0, action 1: 0SEND_F1 waits for 0F1, which this rank does not have; deadlock")
    assert "rank 0 at 0SEND_F1 waits until rank 1 posts 1RECV_F1" in message
    assert "rank 1 at 1SEND_F0 waits until rank 0 posts 2RECV_F0" in message


def test_a_missing_action_is_not_called_a_deadlock():
    program = lower(build("1f1b", ranks=3, microbatches=2))
    for rank, steps in enumerate(program.ranks):
        for step in steps:
            with pytest.raises(ScheduleError) as caught:
                verify(replaced(program, rank, [other for other in steps if other != step]))
            assert str(step) in str(caught.value) and "deadlock" not in str(caught.value)


def test_a_ring_of_waiting_ranks_is_named_without_those_who_merely_wait_for_it():
    """Ranks 0 and 1 wait for each other, rank 2 for rank 1."""
    program = lower(build("1f1b", ranks=3, microbatches=2))
    # Rank 0 posts its gradients' receives only before its first backward, which is still early enough: no deadlock.
    receives = [Action(Op.RECV_B, 0, 0), Action(Op.RECV_B, 0, 1)]
    late = [step for step in program.ranks[0] if step not in receives]
    at = late.index(Action(Op.B, 0, 0))
    late[at:at] = receives
    assert accepted(replaced(program, 0, late))
    # But if rank 1 takes rank 0's second activation only behind its first gradient, both wait.
    blocked = [step for step in program.ranks[1] if step != Action(Op.RECV_F, 1, 1)]
    blocked = [step for step in blocked if step not in (Action(Op.F, 1, 1), Action(Op.SEND_F, 1, 1))]
    at = blocked.index(Action(Op.SEND_B, 1, 0)) + 1
    blocked[at:at] = [Action(Op.RECV_F, 1, 1), Action(Op.F, 1, 1), Action(Op.SEND_F, 1, 1)]
    with pytest.raises(ScheduleError) as caught:
        verify(replaced(replaced(program, 0, late), 1, blocked))
    message = str(caught.value)
    assert "rank 0 at 0SEND_F1 waits until rank 1 posts 1RECV_F1" in message
    assert "rank 1 at 1SEND_B0 waits until rank 0 posts 0RECV_B0" in message
    assert "rank 2" not in message


def test_a_ring_of_compute_alone_is_a_deadlock_too():
    """Each rank runs second what the other needs first; no send is even reached."""
    placement = Placement(PlacementKind.LOOP, 2, 2)
    orders = ("2F0 0F0", "1F0 3F0")
    text = "penstock schedule 1\nname: x\nplacement: loop\nranks: 2\nstages_per_rank: 2\nmicrobatches: 1\n"
    text += "training: no\nlive_bound: none\n" + "".join(f"rank {rank}: {words}\n" for rank, words in enumerate(orders))
    schedule = from_text(text)
    assert isinstance(schedule, Schedule) and schedule.placement == placement
    with pytest.raises(ScheduleError) as caught:
        verify(lower(schedule))
    assert "rank 0 at 2F0 waits until rank 1 starts 1SEND_F0" in str(caught.value)
    assert "rank 1 at 1F0 waits until rank 0 starts 0SEND_F0" in str(caught.value)


def edited(**changes: str) -> Program:
    """1F1B on two ranks with two microbatches; `rank0="a > b"` writes b in place of the words a."""
    lines = to_text(lower(build("1f1b", ranks=2, microbatches=2))).splitlines()
    for key, change in changes.items():
        at = next(at for at, line in enumerate(lines) if line.startswith(f"rank {key[-1]}:"))
        old, new = change.split(">")
        assert f" {old.strip()} " in lines[at] + " "
        lines[at] = (lines[at] + " ").replace(f" {old.strip()} ", f" {new.strip()} ")
    program = from_text("\n".join(lines))
    assert isinstance(program, Program)
    return program


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank0": "0SEND_F1 >"}, "rank 0: 0SEND_F1 is missing"),
        ({"rank1": "1B1 >"}, "rank 1, action 7: 1SEND_B1 waits for 1B1 or 1I1, which this rank does not have"),
        ({"rank1": "1RECV_F1 >"}, "rank 1, action 5: 1F1 waits for 1RECV_F1, which this rank does not have"),
        (
            {"rank0": "0F0 0SEND_F0 > 0SEND_F0 0F0"},
            "rank 0, action 3: 0SEND_F0 waits for 0F0, which comes only at action 4",
        ),
        ({"rank0": "0F1 > 0F1 0F1"}, "rank 0, action 6: 0F1 repeats what 0F1 did at action 5"),
        ({"rank0": "0B1 > 0I1"}, "rank 0, action 9: 0REDUCE_GRAD waits for 0B1 or 0W1, which this rank does not have"),
        ({"rank0": "0B1 > 0B1 0W1"}, "rank 0, action 9: 0W1 repeats what 0B1 did at action 8"),
        ({"rank0": "0B1 > 0W1 0I1"}, "rank 0, action 8: 0W1 waits for 0B1 or 0I1, which comes only at action 9"),
        ({"rank0": "0REDUCE_GRAD >"}, "rank 0, action 9: STEP waits for 0REDUCE_GRAD, which this rank does not have"),
        ({"rank1": "1REDUCE_GRAD STEP > 1REDUCE_GRAD"}, "rank 1: STEP is missing"),
        ({"rank0": "0F0 > 1F0"}, "rank 0, action 3: 1F0 belongs on rank 1, which holds stage 1"),
        ({"rank0": "0F0 > 5F0"}, "rank 0, action 3: 5F0 names a stage that is not there, the last one is 1"),
        ({"rank0": "0F0 > 0F2"}, "rank 0, action 3: 0F2 has a microbatch the stage does not see, its last one is 1"),
        ({"rank1": "1F1 > 1F1 1SEND_F1"}, "rank 1, action 7: 1SEND_F1 has no other rank at its far end"),
        (
            {"rank1": "1RECV_F0 1RECV_F1 > 1RECV_F1 1RECV_F0"},
            "rank 0 sends 0SEND_F0 as message 1 to rank 1, which waits there for 1RECV_F1",
        ),
    ],
)
def test_a_refusal_names_rank_action_and_reason(change: dict[str, str], message: str):
    with pytest.raises(ScheduleError) as caught:
        verify(edited(**change))
    assert message in str(caught.value)


def test_the_step_is_the_last_action():
    program = lower(build("inference", ranks=2, microbatches=1))
    with pytest.raises(ScheduleError, match="rank 0, action 3: STEP has no place in a forward-only program"):
        verify(replaced(program, 0, [*program.ranks[0], Action(Op.STEP)]))
    training = lower(build("1f1b", ranks=2, microbatches=1))
    *rest, step = training.ranks[1]
    # A receive needs nothing and so might stand anywhere, but not behind the step.
    receive = Action(Op.RECV_F, 1, 0)
    assert rest[0] == receive
    late = replaced(training, 1, [*rest[1:], step, receive])
    with pytest.raises(ScheduleError, match="rank 1"):
        verify(late)
    unneeded = [step for step in training.ranks[0] if step != Action(Op.STEP)]
    with pytest.raises(ScheduleError, match="rank 0: STEP is missing"):
        verify(replaced(training, 0, unneeded))
