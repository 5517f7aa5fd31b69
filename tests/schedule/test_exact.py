"""The solver: what it proves is not below the closed-form bounds, and the search reaches it on small pipelines."""

from itertools import pairwise

import pytest

from penstock.schedule import Costs, Op, Placement, PlacementKind, build, flatten, lower, simulate, verify
from penstock.schedule.search import bound
from tests.schedule.exact_search import optimum

# The same numbers wherever it runs.
pytestmark = pytest.mark.subject("src/penstock/schedule/**/*.py")

# Kind, ranks, stages a rank, microbatches; limit, share; times of F, I, W and a transfer. In the first group the closed
# form is the optimum, in the second it is below.
TIGHT = (
    ("loop", 2, 1, 5, 2, 0.5, (3, 3, 2, 1)),
    ("loop", 3, 1, 6, 3, 0.37, (4, 4, 2, 1)),
    ("loop", 3, 1, 4, 6, 1.0, (5, 4, 3, 0)),
    ("loop", 2, 2, 4, 2, 0.0, (8, 4, 6, 1)),
    ("v", 2, 2, 4, 2, 1.0, (2, 2, 2, 0)),
    ("loop", 4, 1, 8, 4, 1.0, (1, 1, 1, 0)),
)
LOOSE = (
    ("v", 4, 2, 2, 1, 0.0, (10, 8, 4, 2)),
    ("loop", 3, 2, 3, 1.5, 1.0, (6, 6, 4, 1)),
    ("v", 2, 2, 2, 1, 0.5, (6, 18, 10, 1)),
)


@pytest.mark.parametrize(("kind", "ranks", "stages_per_rank", "microbatches", "limit", "share", "times"), TIGHT + LOOSE)
def test_the_search_reaches_the_optimum_of_small_pipelines(
    kind: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    limit: float,
    share: float,
    times: tuple[float, ...],
):
    placement = Placement(PlacementKind(kind), ranks, stages_per_rank)
    forward, backward_input, backward_weight, transfer = times
    costs = Costs(forward, backward_input, backward_weight, transfer, weight_memory_share=share)
    best = optimum(placement, microbatches, costs, limit, time_limit_s=40)
    assert best.is_proven
    assert bound(placement, microbatches, costs, limit) <= best.bound + 1e-9

    program = lower(best.schedule)
    verify(program)
    timeline = simulate(program, costs)
    assert timeline.span_cost == pytest.approx(best.span)
    assert max(timeline.peak_live_microbatches) <= limit + 1e-9

    found = build(
        "auto",
        ranks=ranks,
        microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        placement=kind,
        max_live_microbatches=limit,
        weight_memory_share=share,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        transfer=transfer,
    )
    assert simulate(lower(found), costs).span_cost == pytest.approx(best.span)


def test_the_bound_is_below_the_optimum_where_it_is_loose():
    """Else the cases above would not tell the solver from the closed form."""
    kind, ranks, stages_per_rank, microbatches, limit, share, times = LOOSE[0]
    placement = Placement(PlacementKind(kind), ranks, stages_per_rank)
    costs = Costs(*times[:3], transfer=times[3], weight_memory_share=share)
    assert bound(placement, microbatches, costs, limit) < optimum(placement, microbatches, costs, limit).bound


def test_unequal_stages_and_times_without_a_scale():
    placement = Placement(PlacementKind.LOOP, 3)
    costs = Costs([1 / 3, 2 / 3, 1.0], [0.5, 0.7, 1 / 7], 0.25, 0.1)
    best = optimum(placement, 4, costs, 3, time_limit_s=20)
    assert best.is_proven
    assert bound(placement, 4, costs, 3) <= best.span
    order = list(flatten(best.schedule.orders[1]))
    assert [action.microbatch for action in order if action.op is Op.F] == [0, 1, 2, 3]


def test_more_memory_is_never_worse():
    placement, costs = Placement(PlacementKind.LOOP, 3), Costs(3, 3, 2, weight_memory_share=0.5)
    spans = [optimum(placement, 4, costs, limit, time_limit_s=20) for limit in (1, 2, 3, 4)]
    assert all(best.is_proven for best in spans)
    assert all(after.span <= before.span for before, after in pairwise(spans))


def test_lengths_that_differ_have_no_optimum():
    with pytest.raises(ValueError, match="one length"):
        optimum(Placement(PlacementKind.LOOP, 2), 2, Costs(lengths=(1.0, 2.0)), 2)


def test_the_search_runs_a_w_early_where_the_optimum_does():
    """Unequal stages, at 1F1B's memory: no rule by which a W fills a wait finds this order."""
    placement, times = Placement(PlacementKind.LOOP, 3), ([14, 18, 16], [14, 18, 16], [7, 9, 8])
    costs = Costs(*times, transfer=1, weight_memory_share=0.4)
    best = optimum(placement, 6, costs, 3, time_limit_s=20)
    assert best.is_proven and bound(placement, 6, costs, 3) < best.span
    forward, backward_input, backward_weight = times
    found = build(
        "auto",
        ranks=3,
        microbatches=6,
        weight_memory_share=0.4,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        transfer=1,
    )
    assert simulate(lower(found), costs).span_cost == pytest.approx(best.span)


def test_both_waits_of_a_rank_count_where_memory_keeps_its_microbatches_apart():
    """With memory for one microbatch, the second one's F come after the first one's I, so each wait is for itself."""
    placement, costs = Placement(PlacementKind.V, 3, 3), Costs(3.0, 3.0, 3.0)
    # The first rank works for 18. From its first F to its first I, of stage 6, are 11, with room for three F.
    # From its last F of stage 0 to that microbatch's I are 17, in which 16 of work are left to it.
    assert bound(placement, 2, costs, 1.0) == 18.0 + (11.0 - 3.0) + (17.0 - 16.0)
    assert bound(placement, 2, costs, 1.0) <= optimum(placement, 2, costs, 1.0, time_limit_s=40).bound
