"""A cut searched for together with its order: shorter steps than any cut by evenness alone, within 1F1B's bytes."""

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import pytest

from penstock.schedule import (
    Costs,
    Op,
    Placement,
    PlacementKind,
    Schedule,
    balanced_cut,
    build,
    check_cut,
    costs_of_cut,
    early_gradients,
    flatten,
    lower,
    options_for_step,
    partition,
    search_cut,
    simulate,
    verify,
)
from penstock.schedule.search.cut import even_cuts
from tests.covering import EVERY

# The same numbers wherever it runs.
pytestmark = pytest.mark.subject("src/penstock/schedule/**/*.py")

# Milliseconds of F, I and W, and megabytes kept, of the units of a decoder of 8 layers with a head that is no whole
# number of halves of layers, as measured on two cores.
EMBEDDING, ATTENTION, MLP, HEAD = (
    (0.5, 0.2, 0.8, 0.0),
    (15.2, 20.8, 11.7, 6.6),
    (23.6, 23.0, 22.9, 10.8),
    (24, 22, 21, 10),
)
DECODER = (EMBEDDING, *(ATTENTION, MLP) * 8, HEAD)
LOOP, V = PlacementKind.LOOP, PlacementKind.V


def costs_of(units: Sequence[Sequence[float]], share: float = 0.98) -> Costs:
    forward, backward_input, backward_weight, kept = zip(*units, strict=True)
    return Costs(forward, backward_input, backward_weight, 1.5, microbatch_bytes=kept, weight_memory_share=share)


def totals(units: Costs) -> list[float]:
    names = ("forward", "backward_input", "backward_weight")
    return [sum(of_unit) for of_unit in zip(*(getattr(units, name) for name in names), strict=True)]


def searched(placement: Placement, microbatches: int, costs: Costs, limit: float, **options) -> Schedule:
    return build(
        "auto",
        ranks=placement.num_ranks,
        microbatches=microbatches,
        stages_per_rank=placement.stages_per_rank,
        placement=placement.kind.value,
        max_live_microbatches=limit,
        **{"effort": 0.1, **options_for_step(costs), **options},
    )


def peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """What each rank keeps at most, counted action by action."""
    kept, share, found = costs.microbatch_bytes, costs.weight_memory_share, []
    assert isinstance(kept, Sequence) and isinstance(share, float)
    change = {Op.F: 1.0, Op.I: share - 1.0, Op.W: -share, Op.B: -1.0}
    for order in schedule.orders:
        found.append(max(accumulate(kept[action.stage] * change[action.op] for action in flatten(order))))
    return found


@pytest.mark.parametrize(("kind", "ranks", "laps", "microbatches"), [(LOOP, 2, 3, 5), (V, 3, 2, 6), (LOOP, 4, 1, 7)])
def test_the_order_for_a_whole_step_is_proved_shorter_and_within_what_its_stages_keep(kind, ranks, laps, microbatches):
    random, placement = Random(ranks), Placement(kind, ranks, laps)
    units = [[random.uniform(1.0, 3.0) for _ in range(4)] for _ in range(placement.num_stages)]
    for share in (0.4, 1.0) if EVERY else (0.4 if kind is V else 1.0,):
        costs = costs_of(units, share)
        found = searched(placement, microbatches, costs, ranks)
        program = lower(found)
        assert verify(program).peak_live_tapes == found.live_bound
        verify(lower(found, receives_ahead=1))
        kept = costs.microbatch_bytes
        assert isinstance(kept, Sequence)
        whole = max(sum(kept[stage] for stage in placement.stages_of(rank)) for rank in range(ranks))
        assert max(peaks(found, costs)) <= ranks * whole * (1 + 1e-9)
        assert found == searched(placement, microbatches, costs, ranks), "a search has one answer"
        # Where all stages keep alike the order that the ranks' own spans ask for is allowed, and never shorter.
        alike = [1.0] * placement.num_stages
        equal = searched(placement, microbatches, costs, ranks, microbatch_bytes=alike)
        spans = searched(placement, microbatches, costs, ranks, whole_step=False)
        assert simulate(lower(equal), costs).makespan <= simulate(lower(spans), costs).makespan * (1 + 1e-12)


def test_memory_for_one_microbatch_is_enough():
    costs = costs_of([(1.0, 1.0, 1.0, float(kept)) for kept in (5, 1, 1, 1)])
    found = searched(Placement(LOOP, 2, 2), 4, costs, 1.0)
    verify(lower(found))
    assert max(peaks(found, costs)) <= 6.0


def test_an_order_that_keeps_too_much_is_searched_for_again_with_fewer_microbatches():
    kept = (4.0, 1.0, 4.0, 1.0)
    each = (1.0,) * 4
    costs = Costs(each, each, each, microbatch_bytes=kept, weight_memory_share=0.5)
    found = searched(Placement(V, 2, 2), 4, costs, 2.0, effort=0.05)
    assert max(peaks(found, costs)) <= 2 * max(kept[0] + kept[3], kept[1] + kept[2])
    assert simulate(lower(found), costs).makespan == 26.0, "27 if what is too much is only moved away"


def test_three_stages_a_rank_are_shorter_than_the_v_that_is_as_even_as_can_be_within_1f1bs_bytes():
    units, placement = costs_of(DECODER), Placement(LOOP, 2, 3)
    found = search_cut(units, placement, 8, effort=0.1)
    costs = costs_of_cut(units, found.cut)
    own = searched(placement, 8, costs, found.max_live_microbatches, effort=0.1)
    verify(lower(own))
    assert simulate(lower(own), costs).makespan == found.makespan
    rival = Placement(V, 2, 2)
    v_costs = costs_of_cut(units, balanced_cut(totals(units), rival))
    zb_v = simulate(lower(build("zb-v", ranks=2, microbatches=8)), v_costs).makespan
    assert found.makespan < 0.993 * zb_v
    one_stage = costs_of_cut(units, partition(totals(units), 2))
    limit = 2 * max(one_stage.microbatch_bytes)  # type: ignore[arg-type]
    assert max(peaks(own, costs)) <= limit * (1 + 1e-9)
    assert max(peaks(early_gradients(build("zb-v", ranks=2, microbatches=8)), v_costs)) > 0.99 * limit


def test_even_cuts_are_cuts_with_the_most_even_ones_first():
    units, placement = costs_of(DECODER), Placement(LOOP, 2, 2)
    cuts = list(even_cuts(totals(units), placement, 30))
    assert len(set(cuts)) == 30

    def slowest(cut: Sequence[range]) -> float:
        each = totals(costs_of_cut(units, cut))
        return max(sum(each[stage] for stage in placement.stages_of(rank)) for rank in range(2))

    for cut in cuts:
        assert check_cut([len(stage) for stage in cut], len(DECODER), 4) == cut
        assert slowest(cut) >= slowest(cuts[0]) * 0.995
    # Tried one by one, no cut of all there are is more even.
    every = (
        check_cut((a, b, c, 18 - a - b - c), 18, 4)
        for a in range(1, 16)
        for b in range(1, 17 - a)
        for c in range(1, 18 - a - b)
    )
    assert slowest(cuts[0]) <= 1.005 * min(map(slowest, every))


def test_what_cannot_be_searched_is_refused_in_one_sentence():
    units = costs_of(DECODER)
    with pytest.raises(ValueError, match="at most 18 stages, not into 20"):
        search_cut(units, Placement(LOOP, 10, 2), 8)
    with pytest.raises(ValueError, match="one number for each unit"):
        search_cut(Costs(), Placement(LOOP, 2, 2), 8)
    with pytest.raises(ValueError, match=r"no cut keeps to 0\.2 live microbatches; 2 are possible"):
        search_cut(units, Placement(LOOP, 2, 2), 8, 0.2)
    with pytest.raises(ValueError, match="microbatch_bytes must have one number for each of 2 stages, got 1"):
        build("auto", ranks=2, microbatches=2, whole_step=True, microbatch_bytes=[1.0])
