"""Groups, bucket reductions, tied parameters and the optimizer's one norm, over real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.optimizer.optimizer import LossScaler, Optimizer, Update
from penstock.model import Sequences
from penstock.parallel import GradientBuckets, Grid, connect, sum_tied
from penstock.runtime import (
    Boundary,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Recorder,
    Stage,
    run_together,
)
from penstock.schedule import build, lower
from penstock.settings import Layout, LearningRate, OptimizerConfig
from tests.dist.launch import run_ranks

SHAPES = {"embedding.weight": (40, 24), "a.weight": (24, 24), "norm.weight": (24,), "b.weight": (7, 5), "bias": (3,)}


def _values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def _parameters(names: list[str], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    values = _values(0, dtype)
    return [(name, nn.Parameter(values[name].clone())) for name in names]


# ---- reduction


def _reduce_buckets(rank: int, dtype: torch.dtype, cap_bytes: int) -> dict[str, Any]:
    grid = connect(Layout(dp=dist.get_world_size()), "cpu")
    parameters = dict(_parameters(list(SHAPES), dtype))
    buckets = GradientBuckets(list(parameters.items()), grid.dp_cp_group, cap_bytes)
    launched = _spy_on_all_reduce()
    given = _values(100 + rank, dtype)
    # A step that ends between launch and wait, then a whole one.
    for microbatch_fails in (True, False):
        launched.clear()
        buckets.zero_()
        torch.stack(
            [(p.double() * given[n].double()).sum() for n, p in parameters.items() if n != "bias"]
        ).sum().backward()
        buckets.launch()
        if not microbatch_fails:
            buckets.wait()
    expected = {name: torch.zeros_like(buckets.gradients[name]) for name in SHAPES}
    for name in SHAPES:
        if name != "bias":
            expected[name] += given[name]
        dist.all_reduce(expected[name])
    return {
        "equal": {name: torch.equal(buckets.gradients[name], expected[name]) for name in SHAPES},
        "launched": launched[: len(buckets.buckets)],
        "buckets": [bucket.gradients.data_ptr() for bucket in buckets.buckets],
    }


def _spy_on_all_reduce() -> list[int]:
    launched: list[int] = []
    original = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **options: Any) -> Any:
        launched.append(tensor.data_ptr())
        return original(tensor, *args, **options)

    dist.all_reduce = spy
    return launched


@pytest.mark.shows(30, 34, 35, 36)
@pytest.mark.parametrize("cap_bytes", [0, 25 * 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bucket_sums_equal_a_reduction_parameter_by_parameter(dtype: torch.dtype, cap_bytes: int) -> None:
    for seen in run_ranks(2, _reduce_buckets, dtype, cap_bytes):
        assert seen["equal"] == dict.fromkeys(SHAPES, True)
        assert seen["launched"] == seen["buckets"], "each bucket once, in its order"
        assert len(seen["buckets"]) == (len(SHAPES) if cap_bytes == 0 else 2)


class _Failing(nn.Module):
    """A layer that fails in the forward or the backward of one microbatch, if told so."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(stage)))
        self.fails_in: tuple[str, int] | None = None
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1
        if self.fails_in == ("forward", number):
            raise ZeroDivisionError("made to fail")
        y = x + torch.tanh(x @ self.weight)
        if self.fails_in == ("backward", number):
            y.register_hook(lambda gradient: 1 / 0)
        return y


class _Pipeline:
    """Two stages in this process, and their gradients, which are summed over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        program, hub = lower(build("1f1b", ranks=2, microbatches=3)), InProcessHub()
        self.layers = [_Failing(stage) for stage in range(2)]
        self.buckets = [GradientBuckets(list(layer.named_parameters()), group) for layer in self.layers]
        self.reduced: list[int] = []
        self.executors = [
            Executor(
                program,
                {number: Stage(number, [("layer", layer)], Boundary(4, torch.float32))},
                InProcessTransport(hub, number),
                Recorder(number),
                reduce=self._reduce,
            )
            for number, layer in enumerate(self.layers)
        ]

    def _reduce(self, stage: int) -> None:
        self.reduced.append(stage)
        self.buckets[stage].launch()

    def step(self, seed: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """The losses, the summed gradients and which stages were reduced, in their order."""
        self.reduced.clear()
        for layer, buckets in zip(self.layers, self.buckets, strict=True):
            layer.num_forwards = 0
            buckets.zero_()
        generator = torch.Generator().manual_seed(seed)
        feeds = [
            Feed(n, Sequences.from_lengths([n]), torch.randn(n, 4, generator=generator), torch.sum) for n in (3, 1, 2)
        ]
        losses = run_together(self.executors, [feeds] * 2)[1]
        for buckets in self.buckets:
            buckets.wait()
        return losses, [buckets.gradients["weight"].clone() for buckets in self.buckets], list(self.reduced)


FAILURES = {
    "in the last stage's first forward": (1, ("forward", 0), []),
    "in the last stage's second backward": (1, ("backward", 1), []),
    "when the last stage is reduced already": (0, ("backward", 2), [1]),
}


def _step_after_failures(rank: int) -> list[tuple[str, list[int], bool, list[int]]]:
    group = connect(Layout(dp=2), "cpu").dp_cp_group
    pipeline, found = _Pipeline(group), []
    for name, (stage, place, _) in FAILURES.items():
        pipeline.layers[stage].fails_in = place
        with pytest.raises(ZeroDivisionError):
            pipeline.step(seed=rank)
        reduced_before = list(pipeline.reduced)
        pipeline.layers[stage].fails_in = None
        losses, gradients, reduced = pipeline.step(seed=10 + rank)
        other_losses, other_gradients, _ = _Pipeline(group).step(seed=10 + rank)
        own = _Pipeline(None).step(seed=10 + rank)[1]
        equal = all(torch.equal(a, b) for a, b in zip(losses, other_losses, strict=True))
        equal &= all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
        summed = not any(torch.equal(a, b) for a, b in zip(gradients, own, strict=True))
        found.append((name, reduced_before, equal and summed, reduced))
    return found


@pytest.mark.shows(34)
def test_a_pipelines_step_after_a_failed_one_reduces_as_if_nothing_had_happened() -> None:
    for found in run_ranks(2, _step_after_failures):
        assert found == [(name, reduced, True, [1, 0]) for name, (_, _, reduced) in FAILURES.items()]


# ---- tied parameters and the optimizer over a pipeline

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
