"""Parameters of a loss are trained where the last layer holds them and gives them beside its output."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import split
from penstock.model import cross_entropy_sum
from penstock.settings import OptimizerConfig, Precision
from tests.dist.launch import run_ranks

WIDTH, VOCAB, STEPS = 8, 32, 3
SPLIT = MicroBatchSpec(num=3)
OPTIMIZER = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def scaled_loss(logits: Tensor, scale: Tensor, microbatch: PackedBatch) -> Tensor:
    loss = cross_entropy_sum(logits, microbatch["labels"])
    return loss * (-scale.float()).exp().sum() + scale.float().sum() * (microbatch["labels"] >= 0).sum()


def batch(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 3, 7, 4, 6, 2)])


def plain_layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB)]


class Head(nn.Module):
    """Gives the logits, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, VOCAB), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale


def layers() -> list[nn.Module]:
    return [*plain_layers()[:-1], Head()]


def loss_fn(output: tuple[Tensor, Tensor], microbatch: PackedBatch) -> Tensor:
    return scaled_loss(*output, microbatch)


def opened(layout: Layout, precision: Precision) -> Engine:
    optimizer = OptimizerConfig(factory=OPTIMIZER, clip_norm=0.0)
    return Engine.from_layers(
        layers(), WIDTH, layout, precision=precision, optimizer=optimizer, device="cpu", timeout_s=60.0
    )


def trained(rank: int, layout: Layout, folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Steps of a run that is saved before the last one and taken on by another engine, in both precisions."""
    found = []
    for precision in (Precision.FP32, Precision.BF16):
        engine = opened(layout, precision)
        losses = [engine.train_batch(batch(step), loss_fn, micro_batches=SPLIT).loss for step in range(STEPS - 1)]
        engine.save(folder / precision)
        other = opened(layout, precision)
        other.load(folder / precision)
        losses.append(other.train_batch(batch(STEPS - 1), loss_fn, micro_batches=SPLIT).loss)
        found.append((losses, {name: own.detach().clone() for name, own in other.parameters().items()}))
        for each in (engine, other):
            each.close()
            each.grid.close()
    return found


def plain(precision: Precision) -> tuple[list[float], dict[str, Tensor]]:
    model = nn.ModuleDict({"layers": nn.ModuleList(layers())})
    if precision is Precision.BF16:
        model.bfloat16()
    parameters = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in parameters.items()}
    optimizer = OPTIMIZER(list(masters.values()))
    gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
    found = []
    for step in range(STEPS):
        losses, parts = [], split(batch(step), SPLIT).microbatches
        weight = sum(int((part["labels"] >= 0).sum()) for part in parts)
        for name, master in masters.items():
            master.grad = gradients[name].zero_()
        for part in parts:
            x: Any = part["tokens"]
            for layer in model["layers"]:  # pyright: ignore
                x = layer(x)
            loss = loss_fn(x, part) * (1.0 / weight)
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in parameters.items():
                gradients[name] += parameter.grad  # pyright: ignore
                parameter.grad = None
        optimizer.step()
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name].data)
        found.append(float(torch.stack(losses).sum()))
    return found, {name: own.detach() for name, own in parameters.items()}


@pytest.mark.shows(165)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_parameter_of_the_loss_that_the_last_layer_holds_is_trained_as_by_plain_pytorch(
    num_ranks: int, tmp_path: Path
) -> None:
    by_rank = run_ranks(num_ranks, trained, Layout(pp=num_ranks), tmp_path)
    for number, precision in enumerate((Precision.FP32, Precision.BF16)):
        losses, expected = plain(precision)
        state: dict[str, Tensor] = {}
        for of_rank in by_rank:
            assert of_rank[number][0] == losses
            state |= of_rank[number][1]
        assert state.keys() == expected.keys()
        assert all(torch.equal(value, state[name]) for name, value in expected.items())
        assert not torch.equal(state["layers.3.scale"].float(), torch.ones(1))
