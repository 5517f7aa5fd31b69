"""The cost model's parts: shapes, clusters, formulas, and the repeated middle of long steps."""

import math
from pathlib import Path

import pytest

from penstock import schedule
from penstock.planner.cluster import Cluster, ClusterError
from penstock.planner.links import wiring
from penstock.planner.model_costs import RecomputedPart, Style, UnitSize, unit_costs
from penstock.planner.shape import ModelShape, find_model, models, published_model
from penstock.planner.times import Order, _simulated, simulate_step
from penstock.schedule import builders
from penstock.settings import Layout, ModelConfig

# Parameters in billions as their papers name them.
SIZES = {
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.9,
    "gpt3-175b": 175,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "qwen3-235b-a22b": 235,
    "gpt-oss-120b": 117,
    "nemotron-3-super": 120.6,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_model_has_its_parameters(name: str):
    assert published_model(name).num_parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)


def test_the_formulas_count_every_parameter_once_and_all_arithmetic():
    shape = models()["qwen3-30b-a3b"]
    units = unit_costs(shape, UnitSize(4096, 2))
    assert sum(unit.parameters + unit.expert_parameters for unit in units) == pytest.approx(shape.num_parameters)
    products = sum(u.forward.flops + u.forward.core_flops for u in units)
    assert 3 * products == pytest.approx(4096 * 2 * shape.flops_per_token(4096))


def test_ranks_share_arithmetic_and_memory():
    shape = models()["llama3-8b"]
    alone, shared = (unit_costs(shape, UnitSize(8192, 1, tp=tp, style=Style(own_engine=False))) for tp in (1, 8))
    for one, part in zip(alone, shared, strict=True):
        assert part.forward.flops == pytest.approx(one.forward.flops / 8)
        assert part.kept_bytes == pytest.approx(one.kept_bytes / 8)
        assert part.forward.tensor_bytes > 0


def test_recomputation_keeps_less_and_computes_more():
    shape = models()["gpt3-20b"]
    kinds = {
        kind: unit_costs(shape, UnitSize(2048, 1, recompute=kind, style=Style(fused_attention=False)))[1]
        for kind in RecomputedPart
    }
    none, core, full = kinds[RecomputedPart.NONE], kinds[RecomputedPart.CORE], kinds[RecomputedPart.FULL]
    assert none.kept_bytes > core.kept_bytes > full.kept_bytes
    assert full.backward_input.flops == pytest.approx(2 * none.backward_input.flops)
    assert core.backward_input.core_flops > none.backward_input.core_flops
    alternate = kinds[RecomputedPart.ALTERNATE]
    assert none.kept_bytes > alternate.kept_bytes > full.kept_bytes
    assert alternate.backward_input.flops == pytest.approx(1.5 * none.backward_input.flops)


def test_names_of_models_and_hosts():
    assert find_model("LLAMA3.1_405B") == published_model("llama3-405b")
    assert find_model("DeepSeekV3 (w/o MTP)") == published_model("deepseek-v3")
    with pytest.raises(ClusterError, match="no model is called 'llama3-71b'; did you mean 'llama3-7"):
        published_model("llama3-71b")
    with pytest.raises(ClusterError, match="no host is called 'h1000'; did you mean 'h100'"):
        Cluster.named("h1000")


def test_a_models_shape_is_that_of_its_settings():
    config = ModelConfig(hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=3, intermediate_size=96, vocab_size=10)
    shape = ModelShape.of(config)
    assert shape.num_parameters == 3 * (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96) + 2 * 10 * 64


CLUSTER = """
host_type = "h100"
num_devices = 32
[device]
memory_gib = 94
[network]
bandwidth_gb_s = 12.5
shared_by = 4
"""


def test_a_clusters_file_changes_a_known_host(tmp_path: Path):
    path = tmp_path / "ours.toml"
    path.write_text(CLUSTER)
    found = Cluster.read(path)
    assert (found.name, found.num_hosts, found.kinds[0].device.memory_bytes) == ("ours", 4, 94 * 2**30)
    assert found.kinds[0].device.peak("bf16") == Cluster.named("h100").kinds[0].device.peak("bf16")
    # Eight ranks of a host reach other hosts by two adapters of 12.5 GB/s; each of eight groups has an eighth of them.
    assert wiring(found, Layout(dp=32)).places[0].gradients.byte_s == pytest.approx(1 / 25e9)
    apart = wiring(found, Layout(dp=4, tp=8)).places[0]
    assert apart.gradients.byte_s == pytest.approx(4 / 12.5e9)
    assert apart.tensor.byte_s == pytest.approx(1 / found.kinds[0].host.bandwidth)


@pytest.mark.shows(146)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('host_type = "h10"', "no host is called 'h10'; did you mean 'h100'"),
        (
            'host_type = "h100"\nnum_devices = 12',
            "12 devices do not fill hosts of 8 in their order, which have 16",
        ),
        (f'host_type = "h100"\nnum_devices = {10**24}', "a cluster has 1 to 10000000 devices, not 1000"),
        ('host_type = "h100"\n[device]\nmemory = 3', "called 'device.memory'; did you mean 'device.memory_gib'"),
        ('host_type = "h100"\n[network]\nlatency_us = -1', "network.latency_us takes a number above 0, not -1"),
        ("num_devices = 4", "devices_per_host is missing; give it, or host_type = one of a100, h100"),
        ('host_type = "h100"\n[device]\npeak_tflops = 3', "device.peak_tflops = 3: expected dict"),
        ("= 3", "is not TOML"),
        ('host_type = "h100"\nnetwork = 5', "no key of a cluster is called 'network'"),
        ('host_type = "h100"\n[device]\npeak_tflops = { bf61 = 9 }', "no dtype of device.peak_tflops is called 'bf61'"),
    ],
)
def test_an_impossible_cluster_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        Cluster.read(path)
    assert message in str(caught.value) and "cluster.toml" in str(caught.value) and "\n" not in str(caught.value)[:60]


@pytest.mark.parametrize("name", [n for n in schedule.names() if n != "auto" and builders.trains(n)])
def test_a_long_step_is_its_short_ones_with_the_middle_repeated(name: str):
    stages = 2 if "interleaved" in name or name == "looped-bfs" else schedule.default_stages(name)
    order = Order(name, 4, 42, stages)
    ends = tuple(1.0 + 0.1 * (stage in (0, 4 * stages - 1)) for stage in range(4 * stages))
    forward = 1.0 if name == "dualpipe" else ends
    costs = schedule.Costs(forward, 1.1, 0.7, action=0.03, transfer=0.1, microbatch_bytes=1.0, weight_memory_share=0.4)
    short, whole = simulate_step(order, costs), _simulated(order, costs)
    assert short.makespan == pytest.approx(whole.makespan, rel=2e-3)
    assert max(short.peak_bytes) == pytest.approx(max(whole.peak_bytes), rel=1e-9)


@pytest.mark.parametrize(("name", "ranks", "stages"), [("interleaved", 2, 2), ("interleaved", 4, 2), ("zb-h2", 8, 1)])
def test_a_long_step_has_no_less_idle_time_than_none(name: str, ranks: int, stages: int):
    uneven = [1.0 + 0.2 * math.sin(9 * stage) for stage in range(ranks * stages)]
    weights = [0.75 * time for time in uneven]
    for transfer in (0.0, 0.4):
        costs = schedule.Costs(uneven, uneven, weights, transfer=transfer, action=0.05)
        order = Order(name, ranks, 20 * ranks, stages)
        short, whole = simulate_step(order, costs), _simulated(order, costs)
        assert 0 <= short.bubble == pytest.approx(whole.bubble, abs=0.015)
        assert short.makespan == pytest.approx(whole.makespan, rel=0.015)
