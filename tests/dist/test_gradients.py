"""Tied parameters and the optimizer's one norm, over real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.optimizer.optimizer import LossScaler, LossScalerConfig, Optimizer, Update
from penstock.parallel import GradientBuckets, Grid, connect, sum_tied
from penstock.settings import Layout, LearningRate, OptimizerConfig
from tests.dist.launch import run_ranks

SHAPES = {"embedding.weight": (40, 24), "a.weight": (24, 24), "norm.weight": (24,), "b.weight": (7, 5), "bias": (3,)}


def _values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def _parameters(names: list[str], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    values = _values(0, dtype)
    return [(name, nn.Parameter(values[name].clone())) for name in names]


CUTS = (
    (("embedding.weight", "a.weight", "norm.weight", "b.weight", "bias"), ()),
    (("embedding.weight",), ("a.weight", "norm.weight", "b.weight", "bias")),
    (("bias", "embedding.weight", "norm.weight"), ("b.weight", "a.weight")),
)
TIES = {"head.weight": "embedding.weight"}


def _train(grid: Grid, cut: tuple[tuple[str, ...], ...], dtype: torch.dtype) -> dict[str, Any]:
    """Three steps from given gradients on a cut's stages, with a tied head behind the last."""
    values = _values(0, dtype)
    stages = [list(names) for names in cut]
    stages[-1].append("head.weight")
    values["head.weight"] = values["embedding.weight"]
    held = stages if grid.layout.pp == 1 else [stages[grid.pp_rank]]
    buckets = [GradientBuckets([(n, nn.Parameter(values[n].clone())) for n in names], cap_bytes=2048) for names in held]
    config = OptimizerConfig(LearningRate(peak=0.01, num_warmup_steps=2), clip_norm=0.5)
    optimizer = Optimizer(buckets, config, grid.pp_control, TIES)
    local = {name: view for stage in buckets for name, view in stage.gradients.items()}
    norms, largest_gap = [], 0.0
    for step in range(3):
        gradients = _values(10 + step, torch.float32)
        gradients["head.weight"] = _values(20 + step, torch.float32)["embedding.weight"]
        for stage in buckets:
            stage.zero_()
        for name, view in local.items():
            view.copy_(gradients[name])
        sum_tied(TIES, local, grid.mirror_group)
        norms.append(optimizer.step().grad_norm)
        total = gradients["embedding.weight"] + gradients["head.weight"]
        every = [total, *(g for n, g in gradients.items() if n not in ("embedding.weight", "head.weight"))]
        expected = math.sqrt(sum(float(g.double().square().sum()) for g in every))
        largest_gap = max(largest_gap, abs(norms[-1] / expected - 1))
    weights = {name: p.detach().clone() for stage in buckets for name, p in stage.parameters.items()}
    return {"norms": norms, "weights": weights, "state": optimizer.state(), "gap": largest_gap}


def _train_on_rank(rank: int, cut: tuple[tuple[str, ...], ...], dtype: torch.dtype) -> dict[str, Any]:
    return _train(connect(Layout(pp=2), "cpu"), cut, dtype)


@pytest.mark.shows(89, 91, 93)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_state_and_norm_do_not_depend_on_the_cut_and_tied_copies_stay_equal(dtype: torch.dtype) -> None:
    alone = [_train(connect(Layout(), "cpu"), cut, dtype) for cut in CUTS]
    runs = [list(run_ranks(2, _train_on_rank, cut, dtype)) for cut in CUTS]
    assert runs and alone[0]["weights"].keys() == {*SHAPES, "head.weight"}
    for ranks in [[one] for one in alone] + runs:
        weights = {name: value for seen in ranks for name, value in seen["weights"].items()}
        state = {name: value for seen in ranks for name, value in seen["state"].items()}
        assert torch.equal(weights["head.weight"], weights["embedding.weight"])
        assert weights.keys() == alone[0]["weights"].keys() and state.keys() == alone[0]["state"].keys()
        assert all(torch.equal(weights[name], alone[0]["weights"][name]) for name in weights)
        assert all(torch.equal(state[name], alone[0]["state"][name]) for name in state)
        for seen in ranks:
            assert seen["norms"] == alone[0]["norms"]
            # float64 sums in two orders
            assert seen["gap"] < 1e-12


def _step_with_infinity(rank: int, place: str) -> dict[str, Any]:
    layout = Layout(pp=2) if place == "stage" else Layout(dp=2)
    grid = connect(layout, "cpu")
    names = [["embedding.weight", "norm.weight"], ["a.weight", "b.weight", "bias"]][grid.pp_rank]
    buckets = GradientBuckets(_parameters(names, torch.float16), grid.dp_cp_group)
    config = OptimizerConfig(LearningRate(peak=0.01, num_warmup_steps=10))
    optimizer = Optimizer([buckets], config, grid.pp_control, scaler=LossScaler(LossScalerConfig(initial=1024.0)))
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
