"""Parameters that a loss function reaches: refused whichever way it does, and trained where the last layer has them."""

from __future__ import annotations

from collections.abc import Callable
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


class Scaled(nn.Module):
    """A loss whose scale is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return scaled_loss(logits, self.scale, microbatch)


def scaled_loss(logits: Tensor, scale: Tensor, microbatch: PackedBatch) -> Tensor:
    loss = cross_entropy_sum(logits, microbatch["labels"])
    return loss * (-scale.float()).exp().sum() + scale.float().sum() * (microbatch["labels"] >= 0).sum()


class Holder:
    """Holds a loss, as a trainer of a user's own does."""

    def __init__(self, loss: Scaled) -> None:
        self.loss = loss

    def compute(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return self.loss(logits, microbatch)


def ways(loss: Scaled) -> dict[str, Callable[..., Any]]:
    """The same loss, in all the ways in which a function may reach what it does not show."""
    free = loss.scale.detach().clone().requires_grad_()
    return {
        "a module": loss,
        "a module within": nn.ModuleDict({"loss": loss})["loss"],
        "partial": partial(lambda own, logits, microbatch: own(logits, microbatch), loss),
        "bound method": Holder(loss).compute,
        "closure": lambda logits, microbatch: loss(logits, microbatch),
        "with metrics": lambda logits, microbatch: (loss(logits, microbatch), {}),
        "tensor": lambda logits, microbatch: scaled_loss(logits, free, microbatch),
        "late": lambda logits, microbatch: (
            cross_entropy_sum(logits, microbatch["labels"]) if first(microbatch) else loss(logits, microbatch)
        ),
        "compiled": torch.compile(loss, backend="eager"),
    }


def first(microbatch: PackedBatch) -> bool:
    return int(microbatch["tokens"][0]) == int(batch(0)["tokens"][0])


def batch(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 3, 7, 4, 6, 2)])


def plain_layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB)]


def refused(rank: int, layout: Layout) -> dict[str, str]:
    """What the engine says of each way, none of which may leave a gradient; frozen, the parameter is no trouble."""
    engine = Engine.from_layers(plain_layers(), WIDTH, layout, device="cpu", timeout_s=60.0)
    found = {}
    for way in ways(Scaled()):
        loss = Scaled()
        given = ways(loss)[way]
        before = {name: own.detach().clone() for name, own in engine.parameters().items()}
        try:
            engine.train_batch(batch(0), given, micro_batches=SPLIT)
            found[way] = "trained"
        except Exception as error:
            found[way] = str(error)
        assert loss.scale.grad is None and engine.step == 0, way
        assert all(torch.equal(own, before[name]) for name, own in engine.parameters().items())
    loss = Scaled().requires_grad_(False)
    assert engine.train_batch(batch(0), loss, micro_batches=SPLIT).success
    # A loss may reach the model's own parameters where they are trained.
    own = [p for name, p in engine.parameters().items() if name == "layers.3.weight"]
    decayed = lambda logits, microbatch: cross_entropy_sum(logits, microbatch["labels"]) + own[0].square().sum()  # noqa: E731
    assert engine.train_batch(batch(1), decayed, micro_batches=SPLIT).success
    engine.close()
    engine.grid.close()
    return found


WORDS = (
    "that requires a gradient and belongs to no layer of this rank, so it would never be trained; let the last layer"
)


@pytest.mark.shows(165)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=3), Layout(dp=2)], ids=str)
def test_a_loss_that_reaches_parameters_is_refused_whichever_way_it_does(layout: Layout) -> None:
    for found in run_ranks(layout.world_size, refused, layout):
        assert found.keys() == ways(Scaled()).keys()
        for way, words in found.items():
            kind = "tensor" if way == "tensor" else "parameter"
            assert f"loss_fn reaches a {kind} of shape [1] {WORDS}" in words, (way, words)


# ---- what the refusal says would be possible


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


# ---- buffers of the loss


class Centred(nn.Module):
    """A loss of logits without their running mean, which it keeps in a buffer."""

    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("mean", torch.zeros(VOCAB), persistent=kind != "not persistent")

    def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        mean = self.mean if self.kind == "moved alone" else self.mean * 0.9 + logits.detach().mean(0) * 0.1
        if self.kind == "in place":
            self.mean.copy_(mean)
        else:
            self.mean = mean.clone()
        return cross_entropy_sum(logits - self.mean, microbatch["labels"])


CENTRED: list[Centred] = []


def by_global(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return CENTRED[0](logits, microbatch)


def saved(rank: int, layout: Layout, folder: Path) -> dict[str, str]:
    """What the save says after a step with each loss, "" where it saves; training goes on."""
    found = {}
    for kind in ("assigned", "in place", "closure", "method", "global", "held", "not persistent", "moved alone"):
        loss, given = Centred(kind), plain_layers()
        CENTRED[:] = [loss]
        if kind == "held":
            given[-1].loss = loss
        ways = {
            "closure": lambda logits, microbatch, loss=loss: loss(logits, microbatch),
            "method": loss.forward,
            "global": by_global,
        }
        engine = Engine.from_layers(given, WIDTH, layout, device="cpu", timeout_s=60.0)
        engine.save(folder / "before")
        assert engine.train_batch(batch(0), ways.get(kind, loss), micro_batches=SPLIT).success
        try:
            engine.save(folder / kind)
            found[kind] = ""
        except ValueError as error:
            found[kind] = str(error)
        assert engine.train_batch(batch(1), ways.get(kind, loss), micro_batches=SPLIT).success
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(165)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_a_buffer_of_the_loss_that_a_step_has_changed_is_refused_at_the_save(layout: Layout, tmp_path: Path) -> None:
    words = "loss_fn reaches the buffer 'mean' of Centred, which a step has changed and which no checkpoint holds; let"
    for found in run_ranks(layout.world_size, saved, layout, tmp_path):
        taken = [kind for kind, said in found.items() if not said]
        assert taken == ["held", "not persistent", "moved alone"]
        assert all(words in said for said in found.values() if said)
