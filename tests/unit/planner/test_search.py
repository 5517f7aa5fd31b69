"""The search: deterministic, within memory, the same as a brute-force choice, and plain where nothing fits."""

import itertools
from dataclasses import replace

import pytest

from penstock import planner
from penstock.planner.model_costs import RecomputedPart
from penstock.planner.search import FAMILIES, ScheduleFamily, _RankCosts, _Search, layouts
from penstock.schedule import build
from penstock.settings import Layout


def plan_of(model: str, devices: int, sequences: int, host: str = "h100") -> planner.Plan:
    workload = planner.Workload(planner.published_model(model), 4096, sequences)
    return planner.plan(workload, planner.Cluster.named(host, devices), effort=0.3)


def test_the_same_arguments_give_the_same_plan_within_memory():
    found = plan_of("llama3-8b", 8, 32)
    assert found == plan_of("llama3-8b", 8, 32)
    assert len(found.best) == 10 and len(found.tried) > 10
    steps = [one.step_s for one in found.best]
    assert steps == sorted(steps)
    assert all(one.peak_bytes <= found.cluster.device.memory_bytes for one in found.best)
    fitting = [one.step_s for one in found.tried if one.peak_bytes <= found.cluster.device.memory_bytes]
    assert found.best[0].step_s == min(fitting)
    for one in found.best:
        assert sum(one.parts_s.values()) == pytest.approx(one.step_s)
    assert len(found.known) == 5 and all(reason for _, reason in found.known)


def test_layouts_fill_the_devices_and_share_the_model_evenly():
    shape = planner.published_model("qwen3-30b-a3b")
    found = list(layouts(planner.Workload(shape, 4096, 64), planner.Cluster.named("h100", 16)))
    assert len(found) > 20 and all(layout.world_size == 16 for layout in found)
    assert all(shape.num_heads % layout.tp == 0 and shape.num_experts % layout.ep == 0 for layout in found)
    assert {layout.ep for layout in found} >= {1, 2, 4, 8, 16}


@pytest.mark.shows(146)
def test_a_model_that_fits_nowhere_says_what_would_be_needed():
    told = r"no layout of 8 devices fits: the least that one needs is .* GiB.*; 112 devices would do"
    with pytest.raises(planner.NothingFits, match=told):
        plan_of("llama3-405b", 8, 8)
    # So many do: a layout of theirs fits.
    workload, cluster = (
        planner.Workload(planner.published_model("llama3-405b"), 4096, 8),
        planner.Cluster.named("h100", 112),
    )
    enough = planner.Candidate(Layout(pp=14, tp=8), "v-min", 2, 1, 8, recompute=RecomputedPart.FULL)
    assert planner.estimate(workload, enough, cluster, planner.Constants()).peak_bytes <= cluster.device.memory_bytes
    with pytest.raises(planner.NothingFits, match="no layout of 64 devices can share 3 sequences"):
        planner.plan(
            planner.Workload(planner.ModelShape("*-", 64, 100, 1, 1, 64, intermediate_size=64), 512, 3),
            planner.Cluster.named("h100", 64),
        )


def test_slower_links_cost_layouts_that_use_them():
    workload = planner.Workload(planner.published_model("llama3-8b"), 4096, 32)
    fast = planner.Cluster.named("h100", 8)
    slow = planner.Cluster(**{**vars(fast), "host": planner.DeviceLink(1e9, 1e-4)})
    shared = next(
        one.candidate for one in planner.plan(workload, fast, effort=0.1).tried if one.candidate.layout.tp == 2
    )
    before, after = (planner.estimate(workload, shared, cluster, planner.Constants()) for cluster in (fast, slow))
    assert after.parts_s["tp"] > 50 * before.parts_s["tp"]
    assert "tp" in planner.comparison(before, after)[3]


# By how many microbatches the published forms are above what a schedule keeps, at most: those in a V round up.
ROUNDED = {"v-half": 1 / 2, "v-min": 4 / 3, "dualpipe-v": 1 / 2}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_search_expects_the_memory_that_a_schedule_uses(family: ScheduleFamily):
    for ranks, stages in itertools.product(range(2, 9), family.stages):
        for microbatches in (ranks, 2 * ranks, 4 * ranks):
            schedule = build(family.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
            more = family.live(ranks, microbatches, stages) - max(schedule.live_bound or ()) / stages
            assert -1e-9 < more < ROUNDED.get(family.name, 0.0) + 1e-9


def test_what_fits_exactly_is_found_and_what_is_a_byte_too_big_is_not():
    workload = planner.Workload(planner.published_model("llama3-8b"), 4096, 32)
    cluster = planner.Cluster.named("h100", 8)
    tried = [
        one
        for one in planner.plan(workload, cluster, effort=0.1).tried
        if one.candidate.schedule not in ("auto", *ROUNDED)
    ]
    assert len(tried) > 10
    one = max(tried, key=lambda one: one.peak_bytes)
    for memory, fits in ((one.peak_bytes, True), (one.peak_bytes - 1, False)):
        smaller = replace(cluster, device=replace(cluster.device, memory_bytes=memory))
        search = _Search(workload, smaller, planner.Constants(), lambda text: None, 1.0)
        assert (search._estimate(one.candidate) is not None) == fits
    families = {family.name: family for family in FAMILIES}
    for one in tried:
        fitting = replace(cluster, device=replace(cluster.device, memory_bytes=one.peak_bytes))
        search = _Search(workload, fitting, planner.Constants(), lambda text: None, 1.0)
        rank = _RankCosts.of(workload, one.candidate, fitting, planner.Constants())
        assert search._one(one.candidate, families[one.candidate.schedule], rank) is not None, one.candidate
