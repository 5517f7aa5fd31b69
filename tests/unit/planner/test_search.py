"""The search: deterministic, within memory, the same as a brute-force choice, and plain where nothing fits."""

import itertools
from dataclasses import replace

import pytest

from penstock import planner
from penstock.planner.footprint import Footprint, footprints
from penstock.planner.search import _RankCosts, _Search, layouts
from penstock.schedule import Schedule, build, builders
from penstock.schedule.builders import registry


def plan_of(model: str, devices: int, sequences: int, host: str = "h100") -> planner.Plan:
    workload = planner.Workload(planner.published_model(model), 4096, sequences)
    return planner.plan(workload, planner.Cluster.named(host, devices), effort=0.3)


def test_the_same_arguments_give_the_same_plan_within_memory():
    found = plan_of("llama3-8b", 8, 32)
    assert found == plan_of("llama3-8b", 8, 32)
    assert len(found.best) == 10 and len(found.tried) > 10
    steps = [one.step_s for one in found.best]
    assert steps == sorted(steps)
    assert all(one.peak_bytes <= found.cluster.kinds[0].device.memory_bytes for one in found.best)
    fitting = [one.step_s for one in found.tried if one.peak_bytes <= found.cluster.kinds[0].device.memory_bytes]
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
    told = r"no layout of 8 devices fits: the least that one needs is .* GiB.*; devices of that size would do"
    with pytest.raises(planner.NothingFits, match=told):
        plan_of("llama3-405b", 8, 8)
    with pytest.raises(planner.NothingFits, match="no layout of 64 devices can share 3 sequences"):
        planner.plan(
            planner.Workload(planner.ModelShape("*-", 64, 100, 1, 1, 64, intermediate_size=64), 512, 3),
            planner.Cluster.named("h100", 64),
        )


def test_slower_links_cost_layouts_that_use_them():
    workload = planner.Workload(planner.published_model("llama3-8b"), 4096, 32)
    fast = planner.Cluster.named("h100", 8)
    slow = replace(fast, kinds=(replace(fast.kinds[0], host=planner.DeviceLink(1e9, 1e-4)),))
    shared = next(
        one.candidate for one in planner.plan(workload, fast, effort=0.1).tried if one.candidate.layout.tp == 2
    )
    before, after = (planner.estimate(workload, shared, cluster, planner.Constants()) for cluster in (fast, slow))
    assert after.parts_s["tp"] > 50 * before.parts_s["tp"]
    assert "tp" in planner.comparison(before, after)[3]


@pytest.mark.shows(197)
@pytest.mark.parametrize("footprint", footprints(), ids=lambda footprint: f"{footprint.schedule} x{footprint.stages}")
def test_the_search_expects_the_memory_that_a_schedule_promises(footprint: Footprint):
    name, stages = footprint.schedule, footprint.stages
    for ranks, times in itertools.product((2, 3, 5, 8, 16), (1, 2, 4)):
        if ranks * stages < 64:
            bound = build(name, ranks=ranks, microbatches=times * ranks, stages_per_rank=stages).live_bound
            assert footprint.live(ranks, times * ranks) == pytest.approx(
                max(bound or ()) / stages, abs=1e-9 if ranks <= 12 else 0.34
            )


@pytest.mark.parametrize("ranks", [1, 2, 8, 12, 64])
def test_the_search_expects_the_published_bubbles(ranks: int):
    after = ranks - 1
    assert Footprint("1f1b", 1).bubble(ranks) == pytest.approx(after)
    assert Footprint("interleaved", 4).bubble(ranks) == pytest.approx(after / 4)
    assert Footprint("zb-h2", 1).bubble(ranks) == pytest.approx(after / 3)
    assert Footprint("zb-v", 2).bubble(ranks) == pytest.approx(after / 6)


def test_pairs_are_known_by_their_orders():
    assert {one.schedule for one in footprints() if one.pairs} == {
        "combined-1f1b",
        "combined-interleaved",
        "dualpipe-v",
    }


@pytest.mark.shows(197)
def test_a_schedule_that_is_entered_is_planned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    def backwards_soon(ranks: int, microbatches: int) -> Schedule:
        """1F1B by another name, which promises nothing of its memory."""
        return replace(build("1f1b", ranks=ranks, microbatches=microbatches), name="mine", live_bound=None)

    builders.register("mine", backwards_soon)
    assert Footprint("mine", 1) in footprints()
    tried = plan_of("llama3-8b", 8, 32).tried
    of_mine, of_1f1b = (
        {replace(one.candidate, schedule=""): one.step_s for one in tried if one.candidate.schedule == name}
        for name in ("mine", "1f1b")
    )
    both = of_mine.keys() & of_1f1b.keys()
    assert both and all(of_mine[one] == of_1f1b[one] for one in both)


def test_what_fits_exactly_is_found_and_what_is_a_byte_too_big_is_not():
    workload = planner.Workload(planner.published_model("llama3-8b"), 4096, 32)
    cluster = planner.Cluster.named("h100", 8)
    (kind,) = cluster.kinds

    def with_memory(size: float) -> planner.Cluster:
        return replace(cluster, kinds=(replace(kind, device=replace(kind.device, memory_bytes=size)),))

    tried = [one for one in planner.plan(workload, cluster, effort=0.1).tried if one.candidate.schedule != "auto"]
    assert len(tried) > 10
    one = max(tried, key=lambda one: one.peak_bytes)
    for memory, fits in ((one.peak_bytes, True), (one.peak_bytes - 1, False)):
        smaller = with_memory(memory)
        search = _Search(workload, smaller, planner.Constants(), 1.0)
        assert (search._estimate(one.candidate) is not None) == fits
    expected = {(one.schedule, one.stages): one for one in footprints()}
    for one in tried:
        fitting = with_memory(one.peak_bytes)
        search = _Search(workload, fitting, planner.Constants(), 1.0)
        rank = _RankCosts.of(workload, one.candidate, fitting, planner.Constants())
        footprint = expected[one.candidate.schedule, one.candidate.stages_per_rank]
        assert search._one(one.candidate, footprint, rank) is not None, one.candidate
