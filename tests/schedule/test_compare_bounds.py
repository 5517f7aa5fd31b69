"""How far `penstock schedule compare` says schedules are from the optimum, against optima by trying all orders."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import inf

import pytest

from penstock.cli.main import main
from penstock.schedule import Action, Costs, Op, Placement, PlacementKind, Schedule, ScheduleError, lower, simulate
from penstock.schedule.search import bound

Order = tuple[Action, ...]
SPLIT = (Op.F, Op.I, Op.W)

# Ranks, microbatches; times of F, I, W and a transfer; what is kept of a microbatch between its I and its W.
CASES = (
    (2, 3, (1.0, 1.0, 1.0, 0.0), 1.0),
    (2, 3, (3.0, 4.0, 2.0, 0.5), 0.5),
    (3, 2, (1.0, 1.0, 1.0, 0.0), 1.0),
    (3, 2, (5.0, 3.0, 4.0, 1.0), 0.4),
    (4, 2, (2.0, 2.0, 1.0, 0.25), 1.0),
)


@cache
def orders(stage: int, num_microbatches: int) -> tuple[Order, ...]:
    """All orders of one stage in which each op takes the microbatches in turn."""

    def further(done: tuple[int, ...]) -> Iterator[Order]:
        if done[-1] == num_microbatches:
            yield ()
        for at, op in enumerate(SPLIT):
            if done[at] < (done[at - 1] if at else num_microbatches):
                more = (*done[:at], done[at] + 1, *done[at + 1 :])
                yield from ((Action(op, stage, done[at]), *rest) for rest in further(more))

    return tuple(further((0, 0, 0)))


def peak(order: Sequence[Action], share: float) -> float:
    change = {Op.F: 1.0, Op.I: share - 1, Op.W: -share}
    live = most = 0.0
    for action in order:
        live += change[action.op]
        most = max(most, live)
    return round(most, 9)


@cache
def optima(ranks: int, microbatches: int, times: tuple[float, ...], share: float) -> dict[float, float]:
    """The shortest span there is at each peak of live microbatches, by trying all orders of all ranks."""
    placement, costs = Placement(PlacementKind.LOOP, ranks), costs_of(times, share)
    shortest: dict[float, float] = {}
    for found in product(*(orders(rank, microbatches) for rank in range(ranks))):
        most = max(peak(order, share) for order in found)
        try:
            span = simulate(lower(Schedule("any", placement, microbatches, found)), costs).span_cost
        except ScheduleError:
            continue  # ranks that wait for each other
        shortest[most] = min(span, shortest.get(most, inf))
    return shortest


def costs_of(times: tuple[float, ...], share: float) -> Costs:
    forward, backward_input, backward_weight, transfer = times
    return Costs(forward, backward_input, backward_weight, transfer, weight_memory_share=share)


@pytest.mark.parametrize(("ranks", "microbatches", "times", "share"), CASES)
def test_no_order_of_a_small_pipeline_goes_below_its_bound_and_some_reach_it(
    ranks: int, microbatches: int, times: tuple[float, ...], share: float
):
    shortest = optima(ranks, microbatches, times, share)
    assert len(shortest) > 1
    placement, costs = Placement(PlacementKind.LOOP, ranks), costs_of(times, share)
    gaps = {most: span / bound(placement, microbatches, costs, most) - 1 for most, span in shortest.items()}
    assert all(gap >= -1e-12 for gap in gaps.values())
    assert min(gaps.values()) < 1e-12


@pytest.mark.parametrize(("ranks", "microbatches", "times", "share"), CASES)
def test_compare_says_how_far_each_schedule_is_from_what_none_can_beat(
    ranks: int, microbatches: int, times: tuple[float, ...], share: float, capsys: pytest.CaptureFixture[str]
):
    words = ["--ranks", str(ranks), "--microbatches", str(microbatches), "--weight-memory-share", str(share)]
    names = ("--forward", "--backward-input", "--backward-weight", "--transfer")
    words += [word for name, time in zip(names, times, strict=True) for word in (name, str(time))]
    names = ("1f1b", "afab", "zb-h1", "zb-h2", "auto")
    assert main(["schedule", "compare", "--json", *words, "--schedules", *names]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["schedule"] for row in rows} == set(names)
    shortest = optima(ranks, microbatches, times, share)
    for row in rows:
        within = [span for most, span in shortest.items() if most <= row["peak_live_microbatches"] + 1e-9]
        assert row["span_bound"] <= min(within) * (1 + 1e-12)
        assert row["above_bound"] == pytest.approx(row["span_cost"] / row["span_bound"] - 1, abs=1e-8)
        assert row["above_bound"] >= row["span_cost"] / min(within) - 1 - 1e-8
    figures = {row["schedule"]: row for row in rows}
    assert figures["1f1b"]["above_bound"] > figures["auto"]["above_bound"] >= 0


def test_compare_has_no_bound_where_a_pair_has_its_own_time(capsys: pytest.CaptureFixture[str]):
    words = ["--ranks", "2", "--microbatches", "4", "--schedules", "1f1b", "--pair", "2.5"]
    assert main(["schedule", "compare", "--json", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["span_bound"] is None and row["above_bound"] is None
    assert main(["schedule", "compare", *words]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert "above" in header and " - " in line and len(header) <= 80
