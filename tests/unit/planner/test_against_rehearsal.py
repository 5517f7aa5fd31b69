"""The planner's formulas against the engine's own code, run without data."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock.cli.plan import _workload_of
from penstock.engine.rehearsal.step import rehearse_run
from penstock.planner.calibrate import candidate_of
from penstock.planner.cluster import Cluster
from penstock.planner.estimate import CONTEXT_BYTES, estimate, stage_costs
from penstock.planner.model_costs import UnitSize, unit_costs
from penstock.planner.times import Constants
from penstock.schedule import Op
from penstock.schedule.recording import CollectiveKind
from penstock.schedule.rehearsal import CollectiveTraffic, MemoryKind, Rehearsal
from penstock.settings.run import from_values

RUN: dict[str, Any] = {
    "output": "runs/none",
    "model.hidden_size": 512,
    "model.intermediate_size": 1408,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 8192,
    "data.corpus": "stdlib",
    "data.sequence_length": 1024,
    "data.num_sequences": 4,
    "parallel.device": "cuda",
    "train.precision": "bf16",
    "train.num_microbatches": 4,
}
EXPERTS = {"experts.num_experts": 4, "experts.num_active": 2, "experts.intermediate_size": 352}
FULL = {"train.recompute": "full"}
PP2 = {"parallel.pp": 2}
CASES: dict[str, dict[str, Any]] = {
    "one device": {},
    "1f1b": PP2,
    "1f1b, recomputed": PP2 | FULL,
    "zb-h1": PP2 | {"schedule.name": "zb-h1"},
    "zb-h1, recomputed": PP2 | FULL | {"schedule.name": "zb-h1"},
    "zb-v": PP2 | {"schedule.name": "zb-v"},
    "tensor parallel": {"parallel.tp": 2},
    "tensor parallel, recomputed": {"parallel.tp": 2} | FULL,
    "a ring": {"parallel.cp": 2},
    "experts": EXPERTS | {"parallel.dp": 2, "parallel.ep": 2, "data.num_sequences": 8},
    "tensor parallel in fp32, recomputed": {"parallel.tp": 2, "train.precision": "fp32"} | FULL,
    "v-half in bf16, four ranks": {"parallel.pp": 4, "schedule.name": "v-half"},
    "one label in ten": {"data.label_share": 0.1},
    "one label in ten, 1f1b": PP2 | {"data.label_share": 0.1},
    "a large vocabulary": {
        "model.vocab_size": 131072,
        "optimizer.zero": True,
        "parallel.dp": 2,
        "data.num_sequences": 8,
    },
}


def rehearsed(name: str, rank: int = 0, cut: tuple[int, ...] = ()) -> Rehearsal:
    """A rehearsal of a case; several tests compare with the same."""
    return _rehearsed(name, rank, cut)


# A cache takes arguments that are left out for others than their defaults.
@cache
def _rehearsed(name: str, rank: int, cut: tuple[int, ...]) -> Rehearsal:
    return rehearse_run(from_values(RUN | CASES[name] | ({"schedule.cut": list(cut)} if cut else {})), rank)


@pytest.mark.shows(216)
@pytest.mark.parametrize("name", CASES)
def test_a_plans_memory_is_that_of_a_rehearsal(name: str):
    config = from_values(RUN | CASES[name])
    layout = config.parallel
    # A CPU's memory has no communicators in it.
    found, on_gpus = (
        estimate(_workload_of(config), candidate_of(config), Cluster.named(host, 8), Constants())
        for host in ("cpu", "h100")
    )
    cut = found.candidate.cut or () if layout.pp > 1 else ()
    peaks = [rehearsed(name, rank, cut).fullest.at_peak for rank in range(layout.pp)]
    communicators = [peak.get(MemoryKind.COMMUNICATORS, 0) for peak in peaks]
    own = max(sum(peak.values()) - others for peak, others in zip(peaks, communicators, strict=True))
    assert found.memory.total == pytest.approx(own, rel=0.06)
    assert on_gpus.memory.reserved - CONTEXT_BYTES == max(communicators)


OF_UNITS = ["one device", "tensor parallel", "a ring", "experts", "1f1b, recomputed", "one label in ten"]


@pytest.mark.parametrize("name", OF_UNITS)
def test_a_unit_keeps_what_a_rehearsal_says(name: str):
    config = from_values(RUN | CASES[name])
    workload, layout = _workload_of(config), config.parallel
    candidate = candidate_of(config)
    size = UnitSize(
        workload.seq_len,
        candidate.microbatch,
        layout.tp,
        layout.cp,
        layout.ep,
        candidate.recompute,
        element_bytes=workload.element_bytes,
        label_share=workload.label_share,
    )
    units = {unit.name: unit for rank in range(layout.pp) for unit in rehearsed(name, rank).units}
    formulas = unit_costs(workload.shape, size)
    assert len(units) == len(formulas) == 10
    for unit, own in zip(units.values(), formulas, strict=True):
        assert unit.parameter_bytes == pytest.approx(
            workload.parameter_bytes * (own.parameters + own.expert_parameters), rel=0.01
        ), unit.name
        # The first layer of a microbatch makes the tables of positions, in fp32, for all.
        tables = 8 * size.tokens * workload.shape.head_size if "attention" in unit.name else 0
        few = 16 * size.tokens
        assert unit.of(Op.F).kept_bytes - tables == pytest.approx(own.kept_bytes, rel=0.1, abs=few), unit.name
        assert unit.of(Op.I).kept_bytes == pytest.approx(own.weight_bytes, rel=0.1, abs=few), unit.name


@pytest.mark.parametrize("name", ["one device", "tensor parallel", "experts", "one label in ten"])
def test_a_units_arithmetic_is_that_of_a_rehearsal(name: str):
    config = from_values(RUN | CASES[name])
    workload, layout = _workload_of(config), config.parallel
    size = UnitSize(workload.seq_len, candidate_of(config).microbatch, layout.tp, layout.cp, layout.ep)
    size = replace(size, label_share=workload.label_share)
    for unit, own in zip(rehearsed(name).units, unit_costs(workload.shape, size), strict=True):
        forward, backward = own.forward, own.backward_input + own.backward_weight
        # A rehearsal counts all scores, of which causal attention needs half.
        assert unit.of(Op.F).flops == pytest.approx(forward.flops + 2 * forward.core_flops, rel=0.01), unit.name
        assert unit.of(Op.B).flops == pytest.approx(backward.flops + 2 * backward.core_flops, rel=0.01), unit.name


def sent_bytes(one: CollectiveTraffic) -> float:
    """The bytes that a rank sends for collectives on a ring of their ranks, by their definition."""
    others = one.num_ranks - 1
    shares = {
        CollectiveKind.SEND_RECEIVE: 1.0,
        CollectiveKind.ALL_GATHER: others,
        CollectiveKind.REDUCE_SCATTER: others / one.num_ranks,
        CollectiveKind.ALL_REDUCE: 2 * others / one.num_ranks,
        CollectiveKind.ALL_TO_ALL: others / one.num_ranks,
    }
    return one.number * one.num_bytes * shares[one.kind]


# The loss and the numbers of tokens of each expert are left out.
@pytest.mark.parametrize(("name", "left_out"), [("tensor parallel", 0.02), ("a ring", 0.02), ("experts", 0.02)])
def test_a_blocks_messages_are_those_of_a_rehearsal(name: str, left_out: float):
    config = from_values(RUN | CASES[name])
    workload, layout = _workload_of(config), config.parallel
    size = UnitSize(workload.seq_len, candidate_of(config).microbatch, layout.tp, layout.cp, layout.ep)
    total = 0.0
    for unit, own in list(zip(rehearsed(name).units, unit_costs(workload.shape, size), strict=True))[1:]:
        whole = own.forward + own.backward_input + own.backward_weight
        expected = sum(sent_bytes(one) for op in (Op.F, Op.B) for one in unit.of(op).collectives)
        found = whole.tensor_bytes + whole.context_bytes + whole.expert_bytes
        assert (1 - left_out) * expected <= found <= expected, unit.name
        total += found
    assert total > 0


def test_gradients_take_the_time_of_the_all_reduces_of_a_rehearsal():
    config = from_values(RUN | {"parallel.dp": 2, "data.num_sequences": 8})
    cluster = Cluster.named("h100", 2)
    cluster = replace(cluster, kinds=(replace(cluster.kinds[0], host=replace(cluster.kinds[0].host, latency_s=0.0)),))
    found = stage_costs(_workload_of(config), candidate_of(config), cluster, Constants())
    reduced = (one for one in rehearse_run(config).collectives if one.kind is CollectiveKind.ALL_REDUCE)
    expected_s = sum(map(sent_bytes, reduced)) / (Constants().links * cluster.kinds[0].host.bandwidth)
    assert found.costs.reduce == pytest.approx(expected_s, rel=0.02)
