"""A user's own layers keep the dtypes that they have: each is trained, saved, resumed and sent in its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import split
from penstock.engine import TrainResult
from penstock.model import CachedRows, CacheSize, cross_entropy_sum
from penstock.settings import LearningRate, OptimizerConfig, Precision, SamplingParams, ScheduleConfig, WeightDecay
from tests.dist.launch import run_ranks

WIDTH, VOCAB, STEPS = 8, 32, 3
SPLIT = MicroBatchSpec(num=3)
CLIP = 0.5
OPTIMIZER = partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
OF_TORCH = OptimizerConfig(factory=OPTIMIZER, clip_norm=CLIP)
BUILT_IN = OptimizerConfig(LearningRate(0.05), clip_norm=CLIP, weight_decay=WeightDecay(0.0))


class Exact(nn.Module):
    """Computes in fp64 whatever comes in, with statistics in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("size", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("size").copy_(self.linear.weight.detach().norm())
        return x + self.linear(x.double()).tanh().to(x.dtype)


class Spectral(nn.Module):
    """Multiplies by complex numbers, and turns by a complex table, as rotary embeddings are often written."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH // 2, WIDTH // 2, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(WIDTH // 2, dtype=dtype))
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        real = self.scale.real.dtype
        pairs = torch.view_as_complex(x.to(real).unflatten(-1, (-1, 2)))
        mixed = self.mix(pairs * self.get_buffer("turn")) * self.scale
        return x + torch.view_as_real(mixed).flatten(-2).to(x.dtype)


class Wave(nn.Module):
    """Gives complex rows to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.polar(torch.ones(()), self.phase.float()) * x.float()


class Seen(nn.Module):
    """Takes complex rows, and gives them in the dtype of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).real.to(self.bias.dtype) + self.bias


class Coarse(nn.Module):
    """Computes in bf16 whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.bfloat16()).to(x.dtype)


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    middle = [Exact(), Spectral(), Wave(), Seen(), Coarse(), Spectral(torch.complex128)]
    return [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]


def batches(step: int, num_replicas: int) -> tuple[PackedBatch, ...]:
    generator = torch.Generator().manual_seed(step)
    documents = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 3, 7, 4, 6, 2)]
    return PackedBatch.from_documents(documents).split_with([6 // num_replicas] * num_replicas)


# ---- what one process does by plain PyTorch


def plain(precision: Precision, num_replicas: int) -> dict[str, Any]:
    """The losses, norms and state of each step: fp32 tensors alone are cast, and 16-bit ones have fp32 masters."""
    model = layers()
    if precision is Precision.BF16:
        for layer in model:
            for own in (*layer.parameters(), *layer.buffers()):
                if own.dtype is torch.float32:
                    own.data = own.data.bfloat16()
    parameters = {f"layers.{i}.{name}": p for i, layer in enumerate(model) for name, p in layer.named_parameters()}
    masters = {name: nn.Parameter(p.detach().float()) if p.itemsize == 2 else p for name, p in parameters.items()}
    optimizer = OPTIMIZER(list(masters.values()))
    found: dict[str, Any] = {"losses": [], "norms": [], "states": []}
    for step in range(STEPS):
        losses, parts = [], [part for own in batches(step, num_replicas) for part in split(own, SPLIT).microbatches]
        weight = sum(int((part["labels"] >= 0).sum()) for part in parts)
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, precision is Precision.BF16_AUTOCAST):
                x = part["tokens"]
                for layer in model:
                    x = layer(x)
                loss = cross_entropy_sum(x, part["labels"]) * (1.0 / weight)
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in parameters.items():
                if (master := masters[name]) is not parameter and parameter.grad is not None:
                    wide = parameter.grad.float()
                    master.grad = wide if master.grad is None else master.grad + wide
                    parameter.grad = None
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        squares = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
        norm = math.sqrt(math.fsum(float(g.norm(dtype=torch.float64)) ** 2 for g in squares))
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name].data)
        buffers = {f"layers.{i}.{name}": b for i, layer in enumerate(model) for name, b in layer.named_buffers()}
        found["losses"].append(float(torch.stack(losses).sum()))
        found["norms"].append(norm)
        found["states"].append({name: own.detach().clone() for name, own in (*parameters.items(), *buffers.items())})
    return found


# ---- the same by engines


@dataclass(frozen=True)
class Case:
    """A layout in which a run begins, with a cut; it ends in another, or one beside it."""

    layout: Layout
    precision: Precision
    cut: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    zero: bool = False


def opened(case: Case, **options: Any) -> Engine:
    optimizer = replace(OF_TORCH if case.layout.dp == 1 else BUILT_IN, zero=case.zero)
    schedule = ScheduleConfig(case.schedule, cut=case.cut)
    options |= {"schedule": schedule, "precision": case.precision, "optimizer": optimizer}
    return Engine.from_layers(layers(), WIDTH, case.layout, timeout_s=60.0, device="cpu", **options)


def state_of(engine: Engine) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in (*engine.parameters().items(), *engine.buffers().items())}


def step_of(engine: Engine) -> TrainResult:
    return engine.train_batch(batches(engine.step, engine.layout.dp)[engine.grid.dp_rank], micro_batches=SPLIT)


def run(rank: int, cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Each case: all steps but the last, saved; the last by one that has loaded, and sends a third its weights."""
    found = []
    for number, case in enumerate(cases):
        results, states = [], []
        engine = opened(case)
        for _ in range(STEPS - 1):
            results.append(step_of(engine))
            states.append(state_of(engine))
        engine.save(folder / str(number))
        other = opened(replace(case, cut=None, schedule="1f1b", zero=False))
        other.load(folder / str(number))
        results.append(step_of(other))
        third = opened(case, learns=False)
        other.send_weights(third)
        states += [state_of(other), state_of(third)]
        for each in (engine, other, third):
            each.close()
            each.grid.close()
        losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
        found.append({"losses": losses, "norms": norms, "states": states})
    return found


CASES = {
    1: [Case(Layout(), precision) for precision in (Precision.FP32, Precision.BF16, Precision.BF16_AUTOCAST)],
    2: [
        Case(Layout(pp=2), Precision.FP32, (4, 4), "zb-h1"),
        Case(Layout(pp=2), Precision.BF16, (6, 2)),
        Case(Layout(dp=2), Precision.BF16, zero=True),
        Case(Layout(dp=2), Precision.FP32),
    ],
}


@pytest.mark.shows(164)
@pytest.mark.parametrize("world", CASES)
def test_each_tensor_of_own_layers_keeps_its_dtype_and_is_trained_as_by_plain_pytorch(
    world: int, tmp_path: Path
) -> None:
    by_rank = run_ranks(world, run, CASES[world], tmp_path)
    for number, case in enumerate(CASES[world]):
        expected = plain(case.precision, case.layout.dp)
        states = [*expected["states"], expected["states"][-1]]
        for found in (of_rank[number] for of_rank in by_rank):
            compare = exactly if case.layout.dp == 1 else closely
            compare(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), f"losses of {case}")
            compare(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), f"norms of {case}")
            for step, (own, theirs) in enumerate(zip(found["states"], states, strict=True)):
                for name, value in own.items():
                    compare(value, theirs[name], f"{name} of {case} after step {step + 1}")
        held = {name for of_rank in by_rank for own in of_rank[number]["states"] for name in own}
        assert held == set(states[0])


# ---- generation


class Alone:
    """Generates from each token alone, so that it keeps nothing."""

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self: Any, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return self(x)


class Embedded(Alone, nn.Embedding):
    """Token ids to rows."""


class Turned(Alone, nn.Linear):
    """Gives a transposed view."""

    def forward(self, input: Tensor) -> Tensor:
        # How sums are rounded depends on strides, which a message does not keep: tanh gives them anew both ways.
        return torch.tanh(super().forward(input)).t().contiguous().t()


class Head(Alone, nn.Linear):
    """Rows to logits."""

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return self(rows.sampled(x.contiguous()))


def generated(rank: int, layout: Layout) -> list[Any]:
    """The tokens and log-probabilities of layers that generate, all in one dtype, which is no setting's."""
    found: list[Any] = []
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(3)
        model = [Embedded(VOCAB, WIDTH), Turned(WIDTH, WIDTH), Turned(WIDTH, WIDTH), Head(WIDTH, VOCAB)]
        engine = Engine.from_layers([layer.to(dtype) for layer in model], WIDTH, layout, device="cpu", timeout_s=30.0)
        answers = engine.generate([[3, 4, 5], [6, 7]], SamplingParams(max_new_tokens=4, temperature=0.0))
        found += [(answer.tokens, answer.log_probs) for answer in answers]
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(164)
def test_own_layers_generate_in_their_dtype_however_they_are_cut() -> None:
    alone = run_ranks(1, generated, Layout())[0]
    assert len(set(map(str, alone))) > 2
    for num_ranks in (2, 3):
        assert all(found == alone for found in run_ranks(num_ranks, generated, Layout(pp=num_ranks)))


def exactly(one: Tensor, other: Tensor, what: str) -> None:
    assert one.dtype == other.dtype and torch.equal(one, other), what


def closely(one: Tensor, other: Tensor, what: str) -> None:
    """Replicas add up in another order."""
    tolerance = 1e-2 if one.dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=what)
