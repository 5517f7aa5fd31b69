"""Work in place on what other layers gave ends as in a plain loop of torch, or between stages on a copy of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, ScheduleConfig
from penstock.data import split
from penstock.model import cross_entropy_sum
from tests.dist.launch import run_ranks

WIDTH, VOCAB, STEPS = 8, 16, 2
SPLIT = MicroBatchSpec(num=3)


class Layer(nn.Module):
    """A function of what the layer before gave, with a weight of its own."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.run = nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: Any, *beside: Tensor) -> Any:
        return self.run(self, x, *beside)


def linear(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x)


def same(layer: Any, x: Tensor, *beside: Tensor) -> Any:
    return (x, *beside) if beside else x


def saves(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).sigmoid()


def view_of_saved(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).exp().T.T[:, :WIDTH]


def changes(layer: Any, x: Tensor) -> Tensor:
    return x.mul_(0.5).add_(layer.linear.bias)


def changes_view(layer: Any, x: Tensor) -> Tensor:
    x[1:].relu_()
    return x


def with_weight(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer.linear(x), layer.linear.weight[:2]


def changes_weight(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    return x + layer.linear(weight.mul_(2)).sum(0)


def expands(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).mean(0, keepdim=True).expand(len(x), WIDTH)


def one_of_several(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).repeat(1, 2).chunk(2, 1)[0]


def slice_of_more(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).repeat(1, 2)[:, WIDTH:]


def two(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The second is needed for the first's backward; the first is not needed."""
    gate = layer.linear(x).sigmoid()
    return x * gate, gate


def changes_first(layer: Any, x: Tensor, gate: Tensor) -> Tensor:
    return x.mul_(2) + layer.linear(gate)


def changes_second(layer: Any, x: Tensor, gate: Tensor) -> Tensor:
    return x + layer.linear(gate.mul_(2))


def picks(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(x)).flip(0)
    return layer.linear(x)[rows], rows


def changes_numbers(layer: Any, x: Tensor, rows: Tensor) -> Tensor:
    return x[rows.fill_(0)] + layer.linear.bias


def without_graph(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).sigmoid().detach()


@dataclass(frozen=True)
class Case:
    """The layers between embedding and head, and which of all are under activation checkpointing."""

    runs: tuple[Callable[..., Any], ...]
    recompute: tuple[int, ...] = ()


ACCEPTED: dict[str, Case] = {
    "after a linear layer": Case((linear, changes, linear, changes)),
    "through a view, after one that passes on": Case((linear, same, changes_view, linear)),
    "a slice of more": Case((slice_of_more, changes, slice_of_more, changes_view)),
    "the first of two": Case((two, changes_first, two, changes_first)),
    "what is saved, but computed again": Case((saves, changes, saves, changes), recompute=(1, 3)),
    "what has no graph": Case((without_graph, changes, without_graph, changes_view)),
}
REFUSED: dict[str, Case] = {
    "what is saved": Case((saves, changes, saves, changes)),
    "what is saved, behind the first cut": Case((linear, saves, changes, linear)),
    "what is saved, behind the last cut": Case((linear, linear, saves, changes_view)),
    "what is saved, passed on by others": Case((saves, same, same, changes)),
    "a view of what is saved": Case((linear, view_of_saved, changes, linear)),
    "a weight": Case((with_weight, changes_weight, with_weight, changes_weight)),
    "an expanded tensor": Case((expands, changes, expands, changes)),
    "one of several views": Case((one_of_several, changes, one_of_several, changes)),
    "the second of two": Case((two, changes_second, two, changes_second)),
    "the second of two, passed on by others": Case((two, same, same, changes_second)),
    "by a layer that is computed again": Case((linear, changes, linear, changes), recompute=(2, 4)),
    "numbers of rows": Case((picks, changes_numbers, picks, changes_numbers)),
}
ALONE, APART = ScheduleConfig("1f1b"), ScheduleConfig("looped-bfs", stages_per_rank=6)
LAYOUTS = [
    (1, ALONE),
    (1, APART),
    (2, ScheduleConfig("1f1b", cut=(2, 4))),
    (2, ScheduleConfig("zb-v")),
    (2, ScheduleConfig("combined-1f1b")),
    (3, ScheduleConfig("1f1b", cut=(2, 2, 2))),
    (3, ScheduleConfig("interleaved")),
]


def layers(case: Case) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Embedding(VOCAB, WIDTH), *map(Layer, case.runs), nn.Linear(WIDTH, VOCAB)]


def batch(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 3, 7, 4, 6)])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plain(case: Case, copies: bool = False) -> dict[str, Tensor]:
    """The weights after some steps of torch alone, where each layer may be given copies.

    Raises: RuntimeError where torch refuses.
    """
    model = layers(case)
    optimizer = sgd([p for layer in model for p in layer.parameters()])
    for step in range(STEPS):
        given = batch(step)
        for part in split(given, SPLIT).microbatches:
            x: Any = part["tokens"]
            for i, layer in enumerate(model):
                if copies:
                    x = tuple(one.clone() for one in x) if isinstance(x, tuple) else x.clone()
                call = partial(checkpoint, layer, use_reentrant=False) if i in case.recompute else layer
                x = call(*x) if isinstance(x, tuple) else call(x)
            (cross_entropy_sum(x, part["labels"]) / int((given["labels"] >= 0).sum())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"layers.{i}.{name}": p.detach() for i, one in enumerate(model) for name, p in one.named_parameters()}


def outcome(case: Case, world: int, schedule: ScheduleConfig) -> dict[str, Tensor] | str:
    """This rank's weights, or what is said of the layer that works in place."""
    options = {"schedule": schedule, "optimizer": sgd, "device": "cpu", "recompute": case.recompute}
    engine = Engine.from_layers(layers(case), WIDTH, Layout(pp=world), **options)
    try:
        for step in range(STEPS):
            engine.train_batch(batch(step), micro_batches=SPLIT)
        return {key: p.detach().clone() for key, p in engine.parameters().items()}
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
        engine.grid.close()


def outcomes(rank: int, world: int, schedule: ScheduleConfig) -> dict[str, dict[str, Tensor] | str]:
    return {name: outcome(case, world, schedule) for name, case in (ACCEPTED | REFUSED).items()}


@functools.cache
def alone() -> dict[str, dict[str, Tensor]]:
    return {name: plain(case) for name, case in ACCEPTED.items()}


def test_torch_itself_refuses_what_is_refused_here() -> None:
    for case in REFUSED.values():
        # Torch alone computes a layer again from what it has changed.
        if not case.recompute:
            with pytest.raises(RuntimeError, match=r"(?i)in.?place|more than one element of the written-to"):
                plain(case)


@pytest.mark.shows(174)
@pytest.mark.parametrize(("world", "schedule"), LAYOUTS, ids=lambda value: getattr(value, "name", str(value)))
def test_work_in_place_ends_as_in_a_plain_loop(world: int, schedule: ScheduleConfig) -> None:
    ranks = run_ranks(world, outcomes, world, schedule)
    for name, weights in alone().items():
        found: dict[str, Tensor] = {}
        for rank in ranks:
            assert not isinstance(rank[name], str), (name, rank[name])
            found |= rank[name]
        assert found.keys() == weights.keys()
        assert all(torch.equal(weight, weights[key]) for key, weight in found.items()), name
    for name, case in REFUSED.items():
        changing = [f"layers.{i + 1}" for i, run in enumerate(case.runs) if run.__name__.startswith("changes")]
        for rank in ranks:
            if schedule is APART and not case.recompute:
                weights, own = plain(case, copies=True), rank[name]
                assert not isinstance(own, str), (name, own)
                assert all(torch.equal(weight, weights[key]) for key, weight in own.items()), name
            elif schedule is ALONE or isinstance(rank[name], str):
                assert any(layer in rank[name] for layer in changing), (name, rank[name])
