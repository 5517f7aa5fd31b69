"""The search: the published table, legality and memory over grids, and that nothing goes below its bounds."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from penstock.schedule import Costs, Op, Placement, PlacementKind, Schedule, build, flatten, lower, simulate, verify
from penstock.schedule.search import bound
from tests.covering import EVERY, pairs_of
from tests.schedule.families import NAMES, PUBLISHED, Published, lowered

# The same numbers wherever it runs.
pytestmark = pytest.mark.subject("src/penstock/schedule/**/*.py")

# Spans and peaks of V-Min, V-Half and ZB-V (arXiv 2405.15362), F, I and W of a stage taking 1: ranks, microbatches.
PUBLISHED_V = (
    *((4, 8, limit, span) for limit, span in ((2, 59), (3, 53), (4, 48))),
    *((4, 12, limit, span) for limit, span in ((2, 83), (3, 77), (4, 72))),
    *((8, 16, limit, span) for limit, span in ((4, 123), (5, 113), (8, 96))),
)


def searched(
    ranks: int, microbatches: int, stages_per_rank: int = 1, *, costs: Costs, limit: float, **options
) -> Schedule:
    return build(
        "auto",
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        max_live_microbatches=limit,
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        transfer=costs.transfer,
        weight_memory_share=costs.weight_memory_share,
        **options,
    )


def checked_span(schedule: Schedule, costs: Costs, limit: float) -> float:
    """The span of a schedule that is proved to be legal, within its limit and its own bounds, and no wonder."""
    program = lower(schedule)
    assert verify(program).peak_live_tapes == schedule.live_bound
    verify(lower(schedule, receives_ahead=1))
    timeline = simulate(program, costs)
    share = costs.weight_memory_share
    assert isinstance(share, float | int), "these rows give one share for all stages"
    assert max(peak_weight(schedule, rank, share) for rank in range(len(program.ranks))) <= limit
    least = bound(schedule.placement, schedule.num_microbatches, costs, limit)
    assert timeline.span_cost >= least * (1 - 1e-12)
    return timeline.span_cost


def peak_weight(schedule: Schedule, rank: int, weight_memory_share: float) -> float:
    """The most live microbatches on a rank, counted anew from its order alone."""
    whole, waiting = set[tuple[int, int]](), set[tuple[int, int]]()
    peak = 0.0
    for action in flatten(schedule.orders[rank]):
        tape = action.stage, action.microbatch
        if action.op is Op.F:
            whole.add(tape)
        elif action.op is Op.I:
            whole.remove(tape)
            waiting.add(tape)
        else:
            assert action.op is Op.W
            waiting.remove(tape)
        peak = max(peak, len(whole) + weight_memory_share * len(waiting))
    assert not whole and not waiting
    return round(peak / schedule.placement.stages_per_rank, 9)


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_published_search_is_reached_within_its_memory(row: Published):
    for limit, bubble in ((8, row.h1), (16, row.search)):
        found = searched(8, row.microbatches, costs=row.costs, limit=limit, effort=0.4)
        assert round(1 - row.work / checked_span(found, row.costs, limit), 4) <= bubble


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_published_search_at_p_microbatches_is_proved_to_be_the_best(row: Published):
    least = bound(Placement(PlacementKind.LOOP, 8), row.microbatches, row.costs, 8)
    assert round(1 - row.work / least, 4) == row.h1


@pytest.mark.parametrize(("ranks", "microbatches", "limit", "span"), PUBLISHED_V)
def test_v_schedules_are_found_at_their_memory(ranks: int, microbatches: int, limit: float, span: float):
    costs = Costs(2, 2, 2)
    found = searched(ranks, microbatches, 2, costs=costs, limit=limit, placement="v", effort=0.4)
    assert checked_span(found, costs, limit) <= span


@pytest.mark.parametrize("ranks", range(1, 9))
def test_at_1f1b_memory_no_schedule_is_shorter(ranks: int):
    """With equal times the bound is reached: so is ZB-H1's span, by the bound's proof the least there is."""
    for microbatches in range(1, 26) if EVERY else (1, 2, 3, 5, 8, 9, 13, 16, 25):
        schedule = build("auto", ranks=ranks, microbatches=microbatches)
        span = checked_span(schedule, Costs(), ranks)
        assert span == pytest.approx(bound(schedule.placement, microbatches, Costs(), ranks), rel=1e-12)
        by_hand = simulate(lower(build("zb-h1", ranks=ranks, microbatches=microbatches))).span_cost
        assert span <= by_hand * (1 + 1e-12)


def random_costs(random: Random, num_stages: int, *, unequal: bool) -> Costs:
    def times(least: float, most: float) -> list[float]:
        return [random.uniform(least, most) for _ in range(num_stages if unequal else 1)] * (
            1 if unequal else num_stages
        )

    share = random.choice((0.0, 0.37, 0.5, 1.0))
    return Costs(times(5, 20), times(5, 20), times(2, 20), random.choice((0.0, 0.5, 4.0)), weight_memory_share=share)


SIZES = pairs_of(
    [("loop", 1), ("loop", 2), ("loop", 3), ("v", 1), ("v", 2), ("v", 4)], (1, 2, 3, 5), range(4), range(4)
)


@pytest.mark.parametrize(("kind", "stages_per_rank"), sorted({size[0] for size in SIZES}))
def test_every_size_and_limit_is_legal_and_within_memory(kind: str, stages_per_rank: int):
    random = Random(f"{kind} {stages_per_rank}")
    for _, ranks, number, other in (size for size in SIZES if size[0] == (kind, stages_per_rank)):
        microbatches = (1, 2, ranks, 2 * ranks + 1)[number]
        limit = (1, 1.5, ranks / 2 + 1, 2.0 * ranks)[other]
        costs = random_costs(random, ranks * stages_per_rank, unequal=random.random() < 0.5)
        found = searched(ranks, microbatches, stages_per_rank, costs=costs, limit=limit, placement=kind, effort=0.01)
        checked_span(found, costs, limit)


@pytest.mark.parametrize("effort", [0.0, 0.3])
def test_a_search_has_one_answer(effort: float):
    def run() -> Schedule:
        return searched(5, 17, 2, costs=Costs(3, 2.5, 2, 0.25), limit=3, placement="v", effort=effort)

    assert run() == run()


def test_many_microbatches_have_the_bubble_of_few():
    """Where memory allows a steady middle without bubble, the waits are those of the ends."""
    for limit in (8, 16):
        costs = Costs(18.5, 18.1, 9.3, 0.6, weight_memory_share=0.37)
        few, many = (
            checked_span(searched(8, microbatches, costs=costs, limit=limit), costs, limit) - microbatches * 45.9
            for microbatches in (40, 320)
        )
        assert many <= few * 1.001 + 1e-6


def test_a_slow_stage_is_kept_busy():
    """The slowest rank has the least to wait for: only its way to and from the others."""
    slow = [1.0, 1.0, 3.0, 1.0]
    costs = Costs(slow, slow, slow)
    assert checked_span(searched(4, 24, costs=costs, limit=8), costs, 8) <= 24 * 9 * 1.01


def test_longer_orders_are_gone_through_to_find_shorter_ones():
    """While only changes that lengthen nothing are kept, the least span that is found here is 170."""
    costs = Costs(5, 6, 3, 0.5, weight_memory_share=0.5)
    found = searched(4, 6, 2, costs=costs, limit=2, effort=0.05)
    assert checked_span(found, costs, 2) <= 167


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_live_microbatches": 0.5}, ["schedule.max_live_microbatches", "at least 1", "0.5"]),
        ({"max_live_microbatches": float("nan")}, ["schedule.max_live_microbatches", "finite", "nan"]),
        ({"placement": "bidirectional"}, ["schedule.placement", '"loop" or "v"', "bidirectional"]),
        ({"weight_memory_share": 1.5}, ["weight_memory_share", "between 0 and 1", "1.5"]),
        ({"forward": -1.0}, ["forward", "at least 0", "-1.0"]),
        ({"backward_weight": float("inf")}, ["backward_weight", "inf"]),
        ({"backward_input": [1.0, 2.0]}, ["backward_input", "each of 3 stages", "2"]),
        ({"transfer": -0.1}, ["transfer", "-0.1"]),
        ({"effort": -1}, ["effort", "at least 0", "-1"]),
    ],
)
def test_impossible_requests_say_what_is_possible(arguments: dict, words: list[str]):
    with pytest.raises(ValueError) as caught:
        build("auto", ranks=3, microbatches=4, **arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "inference"])
def test_no_schedule_is_shorter_than_the_bound_at_its_own_memory(name: str):
    random = Random(name)
    for ranks, microbatches in product((1, 2, 3, 6), (1, 2, 5, 12)):
        program = lowered(name, ranks, microbatches)
        times = Costs(
            *(random.uniform(1, 9) for _ in range(3)), transfer=1.5, weight_memory_share=random.choice((0.4, 1.0))
        )
        lengths = [random.uniform(0.5, 2) for _ in range(microbatches)]
        for costs in (times, replace(times, lengths=lengths)):
            timeline = simulate(program, costs)
            least = bound(program.placement, microbatches, costs, max(1, *timeline.peak_live_microbatches))
            assert 0 < least <= timeline.span_cost * (1 + 1e-12)


def test_bounds_see_what_costs_say():
    placement = Placement(PlacementKind.LOOP, 4)
    alike = bound(placement, 8, Costs(1, 1, 1, 0.5), 4)
    assert bound(placement, 8, Costs(1, 1, 1, 0.25, message_bytes=1, bandwidth=4), 4) == pytest.approx(alike)
    assert bound(placement, 8, Costs(1, 1, 1, 0.5, lengths=(2.0,) * 8), 4) == pytest.approx(
        bound(placement, 8, Costs(2, 2, 2, 0.5), 4)
    )
    assert bound(placement, 2, Costs(1, 1, 1, 0.5, lengths=(1.0, 3.0)), 4) == 12
    # Without a limit only the ways and the work are left.
    assert bound(placement, 100, Costs(1, 1, 1)) == 300
