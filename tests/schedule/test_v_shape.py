"""Schedules on a V: spans and peaks of the published schedulers, at equal times of F, I and W."""

import pytest

from penstock.schedule import Costs, Timeline, simulate, verify
from tests.schedule.families import lowered

# One slot for each of F, I and W on each of a rank's two stages.
EQUAL = Costs(2, 2, 2)

# p, m, span, makespan, peak of the schedulers that came with arXiv 2405.15362 (sail-sg, zero-bubble).
PUBLISHED = {
    "v-min": [(4, 8, 59, 59, 2), (4, 12, 83, 83, 2), (8, 16, 123, 123, 4), (5, 10, 75, 75, 3), (7, 14, 107, 107, 3)],
    "v-half": [(4, 8, 53, 53, 3), (4, 12, 77, 77, 3), (8, 16, 113, 113, 5), (6, 12, 83, 83, 4), (9, 18, 131, 131, 5)],
    "zb-v": [(4, 8, 48, 51, 4), (4, 12, 72, 75, 4), (8, 16, 96, 103, 8), (8, 8, 55, 55, 8), (6, 6, 41, 41, 6)],
}
# The same from further sizes: the least and the most microbatches they were asked for.
MORE = {
    "v-min": [(2, 4, 27, 27, 2), (3, 9, 59, 59, 2), (6, 6, 53, 53, 3), (8, 32, 219, 219, 4), (10, 10, 95, 95, 4)],
    "v-half": [(2, 4, 25, 25, 2), (3, 9, 59, 59, 2), (7, 7, 66, 66, 4), (8, 32, 209, 209, 5), (10, 20, 143, 143, 6)],
    "zb-v": [(2, 2, 13, 13, 2), (3, 3, 20, 20, 3), (5, 5, 34, 34, 5), (7, 28, 168, 174, 7), (8, 33, 198, 205, 8)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_spans_and_peaks_are_those_published_or_better(name: str):
    for p, m, span, makespan, peak in PUBLISHED[name] + MORE[name]:
        result = simulate(lowered(name, p, m), EQUAL)
        assert result.span_cost <= span and result.makespan <= makespan
        assert max(result.peak_live_microbatches) <= peak


def timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    return simulate(lowered(name, ranks, microbatches), EQUAL)


def test_zero_bubble_is_zero():
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 33):
            result = timeline("zb-v", p, m)
            assert result.bubble_rate == 0
            assert result.makespan == 6 * m + p - 1


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_memory_keeps_to_its_promise(name: str):
    for p in range(1, 9):
        promised = {"zb-v": p, "v-half": p // 2 + 1, "v-min": (p + 1) // 3 + 1}[name]
        for m in (1, 2, 3, p, 2 * p, 3 * p + 1):
            assert max(verify(lowered(name, p, m)).peak_live_tapes) <= 2 * min(promised, m)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_the_bubble_does_not_grow_with_the_microbatches(name: str):
    for p in (2, 3, 4, 5, 8):
        spans = [timeline(name, p, m).span_cost - 6 * m for m in (3 * p, 4 * p, 33)]
        assert spans[0] == spans[1] == spans[2]


def test_less_memory_costs_more_time():
    for p in range(3, 9):
        makespans = [timeline(name, p, 3 * p).makespan for name in ("zb-v", "v-half", "v-min")]
        assert makespans == sorted(makespans)
