"""Stages of a generation are cut by what a step of decoding takes: weights are read once, caches for every row."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine import EngineOptions
from penstock.engine.generation.decode_cut import cut_to_decode, decode_times
from penstock.engine.options import EngineArguments
from penstock.model import decoder_units
from penstock.settings import ExpertConfig, ModelConfig, ParallelConfig, Precision, Quantize, ScheduleConfig

MODEL = ModelConfig(vocab_size=4096, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, max_length=128)
OPTIONS = EngineOptions(device="cpu", learns=False)


def times_by_kind(num_rows: int, num_tokens: float, model: ModelConfig = MODEL, **changed: Any) -> dict[str, float]:
    units = decoder_units(model)
    times = decode_times(units, replace(OPTIONS, **changed), num_rows, num_tokens)
    return {unit.name.rpartition(".")[2]: time for unit, time in zip(units, times, strict=True)}


def sizes(num_rows: int, num_tokens: float, pp: int = 2, options: EngineOptions = OPTIONS) -> tuple[int, ...]:
    layout = ParallelConfig(pp=pp)
    given = EngineArguments(lambda groups: decoder_units(MODEL, groups=groups), 512, layout, options, None)
    cut = cut_to_decode(given, num_rows, num_tokens).options.choice.settings.cut
    assert not isinstance(cut, str)
    return cut or ()


@pytest.mark.parametrize(
    "num_rows, num_tokens, measured_ms",
    [
        (8, 80, {"attention": 0.574, "mlp": 0.385, "head": 0.347}),
        (32, 80, {"attention": 1.582, "mlp": 0.88, "head": 0.785}),
        (8, 528, {"attention": 1.562, "mlp": 0.412, "head": 0.371}),
        (16, 528, {"attention": 3.203, "mlp": 0.669, "head": 0.584}),
    ],
)
def test_times_are_near_those_measured(num_rows: int, num_tokens: int, measured_ms: dict[str, float]):
    """On one core of an AMD EPYC, in fp32; only the times beside each other matter."""
    times = times_by_kind(num_rows, num_tokens)
    assert times["embedding"] < 0.01 * times["mlp"]
    for kind, measured in measured_ms.items():
        assert times[kind] / times["mlp"] == pytest.approx(measured / measured_ms["mlp"], rel=0.25), kind


def test_attention_moves_to_where_the_head_is_not_as_rows_grow_longer():
    assert sizes(1, 1, options=replace(OPTIONS, device="cuda")) == (10, 8), "weights count: the head is an MLP's"
    assert sizes(32, 96) == (9, 9)
    assert sizes(32, 96, pp=4) == (5, 4, 4, 5)
    assert sizes(32, 4096, pp=8) == (3, 2, 2, 2, 2, 2, 2, 3), "one attention for each stage"


def test_a_cut_by_hand_stays_and_one_stage_needs_none():
    assert sizes(32, 96, options=replace(OPTIONS, schedule=ScheduleConfig(cut=(4, 14)))) == (4, 14)
    assert sizes(32, 96, pp=1) == ()


def test_quantised_weights_are_read_sooner_but_caches_are_not():
    exact, quantised = times_by_kind(8, 256), times_by_kind(8, 256, quantize=Quantize.INT8)
    assert quantised["mlp"] < 0.3 * exact["mlp"]
    assert 0.8 * exact["attention"] < quantised["attention"] < exact["attention"]
    assert times_by_kind(8, 256, precision=Precision.BF16)["mlp"] == exact["mlp"] / 2


def test_of_experts_more_are_read_with_more_rows():
    experts = ExpertConfig(num_experts=16, num_active=2, intermediate_size=512)
    model = replace(MODEL, experts=experts)
    one, four, many, more = (times_by_kind(rows, 1, model)["mlp"] for rows in (1, 4, 32, 64))
    assert 3 * one < four < 4.5 * one
    assert more < 1.5 * many, "all are read, and only products are added"
    dense = times_by_kind(1, 1, replace(MODEL, intermediate_size=2 * 512))["mlp"]
    assert one == pytest.approx(dense, rel=0.2), "a row reads those that it goes to"
