"""Hosts that differ: said in a cluster's file, planned for with uneven cuts, and refused where they cannot be."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import planner
from penstock.planner.cluster import Cluster, ClusterError
from penstock.planner.model_costs import RecomputedPart
from penstock.planner.shape import ModelShape, models
from penstock.settings import Layout, RunConfig
from penstock.settings.run import from_values

TWO_KINDS = """
host_type = "h100"
[[hosts]]
[[hosts]]
host_type = "a100"
network = { bandwidth_gb_s = 10.0 }
"""
WORKLOAD = planner.Workload(planner.published_model("llama3-8b"), 4096, 32)
HALVES = planner.Candidate(Layout(pp=2, dp=8, order="pp-dp-cp-tp"), "1f1b", 1, 1, 4, 1, RecomputedPart.FULL)


def read(folder: Path, text: str, num_devices: int | None = None) -> Cluster:
    (folder / "ours.toml").write_text(text)
    return Cluster.read(folder / "ours.toml", num_devices)


def estimated(candidate: planner.Candidate, cluster: Cluster) -> planner.Estimate:
    return planner.estimate(WORKLOAD, candidate, cluster, planner.Constants())


@pytest.mark.shows(173)
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_slower_device_gets_fewer_layers_wherever_its_host_stands(tmp_path: Path, schedule: str, stages: int):
    cluster = read(tmp_path, TWO_KINDS)
    turned = replace(cluster, kinds=cluster.kinds[::-1])
    candidate = replace(HALVES, schedule=schedule, stages_per_rank=stages)
    for on, slower in ((cluster, 1), (turned, 0)):
        found = estimated(candidate, on)
        cut = found.candidate.cut
        assert cut is not None
        ranks = candidate.order.placement.rank_of
        of_ranks = [sum(size for i, size in enumerate(cut) if ranks(i) == rank) for rank in range(2)]
        # An A100 makes the products of bf16 in 3.2 times the time of an H100.
        assert 2 < of_ranks[1 - slower] / of_ranks[slower] < 4
        borders = [round(66 * i / len(cut)) for i in range(len(cut) + 1)]
        even = tuple(after - before for before, after in itertools.pairwise(borders))
        assert found.step_s < 0.75 * estimated(replace(candidate, cut=even), on).step_s
        alone = estimated(candidate, Cluster.named("h100", 16)).step_s, estimated(candidate, Cluster.named("a100", 16))
        assert alone[0] < found.step_s < alone[1].step_s


@pytest.mark.shows(173)
def test_a_plan_of_hosts_that_differ_is_the_fastest_that_was_tried_and_fits_each_device(tmp_path: Path):
    cluster = read(tmp_path, TWO_KINDS)
    found = planner.plan(WORKLOAD, cluster, effort=0.05)
    best = found.best[0]
    assert best.candidate.layout.pp > 1 and best.step_s == min(one.step_s for one in found.tried if one.fits)
    assert all(one.fits and one.memory.device in (80 * 2**30,) for one in found.best)
    # Without pipelines, every copy waits for the slowest.
    alone = planner.Candidate(Layout(dp=16), "1f1b", 1, 1, 2, 1, RecomputedPart.FULL)
    assert estimated(alone, cluster).step_s >= estimated(alone, Cluster.named("a100", 16)).step_s
    assert best.step_s < 0.8 * estimated(alone, cluster).step_s
    # Each is judged by its own device.
    small = replace(cluster.kinds[1], device=replace(cluster.kinds[1].device, memory_bytes=12 * 2**30))
    tight = replace(cluster, kinds=(cluster.kinds[0], small))
    one = estimated(replace(HALVES, schedule="1f1b"), tight)
    assert one.memory.device == 12 * 2**30 and one.fits == (one.peak_bytes <= 12 * 2**30)
    # Their peak is that of all of them.
    flops = WORKLOAD.num_tokens * WORKLOAD.shape.flops_per_token(4096) / one.step_s
    assert one.mfu == pytest.approx(flops / (8 * 989.4e12 + 8 * 312e12))


@pytest.mark.shows(173)
def test_equal_hosts_said_one_by_one_are_planned_for_as_before(tmp_path: Path):
    plain = read(tmp_path, 'host_type = "h100"\nnum_devices = 16\n')
    apart = read(tmp_path, 'host_type = "h100"\n[[hosts]]\n[[hosts]]\n')
    assert plain.kinds == apart.kinds and estimated(HALVES, plain) == estimated(HALVES, apart)
    # The rest of the file holds for all hosts, and what a table says for its own.
    slower = read(
        tmp_path,
        'host_type = "h100"\nnetwork = {bandwidth_gb_s = 7.0}\n[[hosts]]\nnumber = 3\n[[hosts]]\n'
        "devices_per_host = 4\nnetwork = {latency_us = 3.0}\n",
    )
    assert [(kind.number, kind.devices_per_host, kind.network.bandwidth) for kind in slower.kinds] == [
        (3, 8, 7e9),
        (1, 4, 7e9),
    ]
    assert slower.num_devices == 28 and slower.num_hosts == 4
    assert slower.kinds[1].network.latency_s == pytest.approx(3e-6) != slower.kinds[0].network.latency_s
    assert read(tmp_path, TWO_KINDS, 8).num_hosts == 1 and read(tmp_path, TWO_KINDS, 4).num_devices == 4


@pytest.mark.shows(146)
@pytest.mark.parametrize(
    ("text", "num_devices", "message"),
    [
        ("hosts = 3", None, "hosts takes tables [[hosts]]"),
        ("hosts = []", None, "hosts takes tables [[hosts]]"),
        ('[[hosts]]\nhost_type = "h10"', None, "no host is called 'h10'; did you mean 'h100'"),
        ('[[hosts]]\nnumber = 0\nhost_type = "h100"', None, "number takes a number above 0, not 0"),
        ('[[hosts]]\nnum_devices = 8\nhost_type = "h100"', None, "no key of a cluster is called 'num_devices'"),
        ("[[hosts]]\nnumber = 2", None, "devices_per_host is missing"),
        (TWO_KINDS, 12, "12 devices do not fill hosts of 8, 8 in their order, which have 16 devices"),
        (TWO_KINDS, 24, "24 devices do not fill hosts of 8, 8"),
        (f'[[hosts]]\nnumber = {10**20}\nhost_type = "h100"', None, "a cluster has 1 to 10000000 devices"),
        ('[[hosts]]\nhost_type = "h100"\ndevice = {peak_tflops = {bf61 = 9}}', None, "no dtype of device.peak_tflops"),
    ],
)
def test_hosts_that_cannot_be_are_refused_in_one_sentence(
    tmp_path: Path, text: str, num_devices: int | None, message: str
):
    with pytest.raises(ClusterError) as caught:
        read(tmp_path, text, num_devices)
    assert message in str(caught.value) and "ours.toml" in str(caught.value)


@pytest.mark.shows(173)
def test_the_shape_of_a_models_settings_is_the_published_one():
    written = 0
    for name, shape in models().items():
        try:
            values = shape.settings()
        except ValueError as error:
            assert str(error).startswith("a run's layers have none of its "), name
            continue
        config: RunConfig = from_values({"output": "runs/none", **values, "model.max_length": 4096})
        assert ModelShape.of(config.model).num_parameters == pytest.approx(shape.num_parameters), name
        assert ModelShape.of(config.model).flops_per_token(4096) == pytest.approx(shape.flops_per_token(4096)), name
        written += 1
    assert written >= 8
