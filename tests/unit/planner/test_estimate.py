"""An estimate's figures against what they are by definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.model import decoder_units
from penstock.model.kv_cache import CacheSize
from penstock.planner.cluster import Cluster
from penstock.planner.estimate import CONTEXT_BYTES, Candidate, Workload, estimate, stage_costs, state_bytes
from penstock.planner.links import wiring
from penstock.planner.model_costs import MessageKind, RecomputedPart, Work
from penstock.planner.search import settings_of
from penstock.planner.shape import ModelShape, published_model
from penstock.planner.times import Clock, Constants
from penstock.settings import Layout, ModelConfig

SHAPE = published_model("llama3-8b")


def _candidate(layout: Layout, zero: int = 0) -> Candidate:
    return Candidate(layout, "1f1b", 1, 1, 8, zero)


@pytest.mark.parametrize(("dtype", "sizes"), [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))])
def test_a_parameter_has_its_gradient_two_moments_and_below_fp32_a_master_copy(dtype: str, sizes: tuple[int, ...]):
    state = state_bytes(Workload(SHAPE, 64, 8, dtype), _candidate(Layout()), dense=100.0, experts=10.0)
    assert (state.parameters, state.gradients, state.optimizer) == tuple(110 * size for size in sizes)


@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 1}, {"head_dim": 8, "num_layers": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_as_large_as_the_layers_make_it(settings: dict[str, Any], dtype: torch.dtype):
    config = ModelConfig(vocab_size=8, hidden_size=64, num_heads=4, **{"num_layers": 2, **settings})
    size = CacheSize(num_rows=3, num_tokens=32, dtype=dtype, device=torch.device("meta"))
    modules: list[Any] = [unit.build() for unit in decoder_units(config)]
    caches = [module.new_cache(size) for module in modules]
    made = sum(cache.num_bytes for cache in caches if cache is not None)
    assert made == 3 * ModelShape.of(config).cache_bytes(32, dtype.itemsize) > 0


@pytest.mark.parametrize(("zero", "shared"), [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients"))])
def test_zero_divides_its_part_of_the_state_among_the_copies(zero: int, shared: tuple[str, ...]):
    workload = Workload(SHAPE, 64, 8)
    whole, part = (state_bytes(workload, _candidate(Layout(dp=4), level), 100.0, 0.0) for level in (0, zero))
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(part, name) == getattr(whole, name) / (4 if name in shared else 1)


@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2, pp=2), Layout(cp=2, pp=4), Layout(dp=8)])
def test_tokens_of_a_device_and_mfu_count_every_device(layout: Layout):
    workload, cluster = Workload(SHAPE, 2048, 64), Cluster.named("h100", layout.world_size)
    found = estimate(workload, _candidate(layout), cluster, Constants())
    assert found.tokens_s_device * layout.world_size * found.step_s == pytest.approx(64 * 2048)
    flops = 64 * 2048 * SHAPE.flops_per_token(2048) / found.step_s
    assert found.mfu == pytest.approx(flops / (layout.world_size * cluster.kinds[0].device.peak("bf16")))


@pytest.mark.parametrize(
    ("host", "layout", "reserved"),
    [
        ("h100", Layout(pp=2), CONTEXT_BYTES + 1_000_000_000),
        ("h100", Layout(pp=2, dp=2, tp=2), CONTEXT_BYTES + 1_800_000_000),
        ("cpu", Layout(pp=2), 0),
    ],
)
def test_the_fullest_rank_has_all_its_parts_and_on_a_gpu_what_others_take(host: str, layout: Layout, reserved: int):
    cluster = Cluster.named(host, layout.world_size)
    memory = estimate(Workload(SHAPE, 512, 8), _candidate(layout), cluster, Constants()).memory
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.tapes, memory.transient)
    assert all(part > 0 for part in parts)
    assert memory.total == sum(parts) + reserved


def test_an_all_reduce_takes_twice_a_scatter_and_a_message_its_latency():
    workload, cluster = Workload(SHAPE, 512, 8), Cluster.named("h100", 4)
    layout = Layout(pp=2, dp=2)
    plain, scattered = (stage_costs(workload, _candidate(layout, zero), cluster, Constants()).costs for zero in (0, 1))
    assert plain.reduce == pytest.approx(2 * scattered.reduce) and plain.reduce > 0
    (kind,) = cluster.kinds
    late = replace(cluster, kinds=(replace(kind, host=replace(kind.host, latency_s=kind.host.latency_s + 1.0)),))
    slower = stage_costs(workload, _candidate(layout), late, Constants()).costs
    assert isinstance(plain.transfer, tuple) and len(plain.transfer) == 2
    assert slower.transfer == pytest.approx([latency + 1.0 for latency in plain.transfer])


def test_the_ring_of_context_parallelism_takes_what_attention_does_not_hide():
    cluster, constants = Cluster.named("h100", 4), Constants()
    clock = Clock(wiring(cluster, Layout(cp=4)).places[0], constants, "bf16")
    (alone_s, _), sent = clock.pass_time(Work(core_flops=1e12)), 1e9
    ring_s = sent / (constants.links * cluster.kinds[0].host.bandwidth) + 3 * cluster.kinds[0].host.latency_s
    assert clock.pass_time(Work(context_bytes=sent))[1] == {MessageKind.CONTEXT: pytest.approx(ring_s)}
    both_s, _ = clock.pass_time(Work(core_flops=1e12, context_bytes=sent))
    assert 0 < alone_s < ring_s == pytest.approx(both_s)
    hidden = clock.pass_time(Work(core_flops=1e14, context_bytes=sent))
    assert hidden == clock.pass_time(Work(core_flops=1e14))


@pytest.mark.parametrize("recompute", [RecomputedPart.NONE, RecomputedPart.FULL])
def test_settings_say_what_is_recomputed(recompute: RecomputedPart):
    candidate = replace(_candidate(Layout(pp=2)), recompute=recompute)
    assert settings_of(candidate)["train.recompute"] == recompute.value
