"""The one verdict on a step, and one owner of each name, over real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.optimizer.optimizer import LossScaler, Optimizer, Update
from penstock.parallel import GradientBuckets, connect
from penstock.settings import Layout, LearningRate, OptimizerConfig
from tests.dist.launch import run_ranks

SHAPES = {"embedding.weight": (40, 24), "a.weight": (24, 24), "norm.weight": (24,), "b.weight": (7, 5), "bias": (3,)}


def _values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def _parameters(names: list[str], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    values = _values(0, dtype)
    return [(name, nn.Parameter(values[name].clone())) for name in names]


def _step_with_infinity(rank: int, place: str) -> dict[str, Any]:
    layout = Layout(pp=2) if place == "stage" else Layout(dp=2)
    grid = connect(layout, "cpu")
    names = [["embedding.weight", "norm.weight"], ["a.weight", "b.weight", "bias"]][grid.pp_rank]
    buckets = GradientBuckets(_parameters(names, torch.float16), grid.dp_cp_group)
    config = OptimizerConfig(LearningRate(peak=0.01, num_warmup_steps=10))
    optimizer = Optimizer([buckets], config, grid.pp_control, scaler=LossScaler(1024.0))
    updates, unchanged, scales = [], [], []
    for step in range(3):
        before = [bucket.parameters.clone() for bucket in buckets.buckets]
        buckets.zero_()
        for bucket in buckets.buckets:
            bucket.gradients.fill_(optimizer.loss_scale)
        if step == 1 and rank == 1:
            buckets.buckets[0].gradients[2] = math.inf
        buckets.launch()
        buckets.wait()
        scales.append(optimizer.loss_scale)
        updates.append(optimizer.step())
        unchanged.append(all(torch.equal(b.parameters, old) for b, old in zip(buckets.buckets, before, strict=True)))
    return {"updates": updates, "unchanged": unchanged, "scales": [*scales, optimizer.loss_scale]}


@pytest.mark.shows(92, 95)
@pytest.mark.parametrize("place", ["stage", "replica"])
def test_an_infinity_on_one_rank_skips_the_step_on_all(place: str) -> None:
    ranks = run_ranks(2, _step_with_infinity, place)
    for seen in ranks:
        first, skipped, later = seen["updates"]
        assert isinstance(first, Update) and seen["unchanged"] == [False, True, False]
        assert (first.success, skipped.success, later.success) == (True, False, True)
        assert math.isnan(skipped.grad_norm) and skipped.learning_rate == first.learning_rate == 0.001
        assert later.learning_rate == pytest.approx(0.003, rel=1e-15), "the absolute step's, not the second's"
        assert seen["scales"] == [1024.0, 1024.0, 512.0, 512.0]
        assert [first, later] == [ranks[0]["updates"][0], ranks[0]["updates"][2]]


def _hold_the_same_name(rank: int) -> str:
    grid = connect(Layout(pp=2), "cpu")
    try:
        Optimizer([GradientBuckets(_parameters(["bias"]))], OptimizerConfig(), grid.pp_control)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.shows(93)
def test_a_name_on_two_ranks_is_refused_on_both() -> None:
    assert ["'bias' is held twice" in message for message in run_ranks(2, _hold_the_same_name)] == [True, True]
