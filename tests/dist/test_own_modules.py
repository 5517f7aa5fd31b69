"""A user's own modules: their modes and their random numbers, in every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import split
from penstock.engine import EngineOptions
from penstock.model import Randomness, cross_entropy_sum
from penstock.settings import LearningRate, OptimizerConfig, WeightDecay
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 32
SPLIT = MicroBatchSpec(num=3)
STEPS = 2
PLAIN = OptimizerConfig(LearningRate(0.05), weight_decay=WeightDecay(0.0), clip_norm=0.0)


@dataclass(frozen=True)
class Case:
    """A layout in which a model of `middle` layers trains, and what is done between its steps."""

    layout: Layout
    schedule: str = "1f1b"
    recompute: str = "none"
    evaluates: bool = False
    norm: bool = False


def layers(norm: bool) -> list[nn.Module]:
    torch.manual_seed(7)
    inner: list[nn.Module] = [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=not norm), nn.BatchNorm1d(WIDTH) if norm else nn.Tanh(), nn.Dropout(0.3)
        )
        for _ in range(3)
    ]
    return [nn.Embedding(VOCAB, WIDTH), *inner, nn.Linear(WIDTH, VOCAB)]


def batch(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 3, 7, 4, 6)])


def train(rank: int, case: Case) -> dict[str, Any]:
    """The losses of some steps, what evaluation says before, between and after them, and the final state."""
    options = EngineOptions(schedule=case.schedule, recompute=case.recompute, optimizer=PLAIN, device="cpu")
    engine = Engine.from_layers(layers(case.norm), WIDTH, case.layout, options)
    torch.manual_seed(rank)
    losses, evaluations = [], []
    for step in range(STEPS):
        if case.evaluates:
            # Whatever ran before: modes that a user has set do not matter either.
            before = {name: buffer.clone() for name, buffer in engine.buffers().items()}
            evaluations.append([])
            for outer, inner in ((step == 1, step == 1), (False, True)):
                set_modes(engine, outer, inner)
                evaluations[-1].append(engine.evaluate([batch(9)], micro_batches=SPLIT))
            engine.forward(batch(8), micro_batches=SPLIT)
            torch.rand(step + 1)
            assert all(torch.equal(before[name], buffer) for name, buffer in engine.buffers().items())
            set_modes(engine, outer=True, inner=False)
        random_state = torch.get_rng_state()
        losses.append(engine.train_batch(batch(step), micro_batches=SPLIT).loss)
        assert torch.equal(torch.get_rng_state(), random_state)
    state = {name: p.detach().clone() for name, p in (*engine.parameters().items(), *engine.buffers().items())}
    engine.close()
    engine.grid.close()
    return {"losses": losses, "evaluations": evaluations, "state": state}


def set_modes(engine: Engine, outer: bool, inner: bool) -> None:
    """Put the layers into training mode or not, and the modules in them into a mode of their own."""
    for stage in engine.pipeline.model.stages.values():
        for _, module in stage.units:
            module.train(inner)
            module.training = outer


def together(case: Case) -> dict[str, Any]:
    """The same of all ranks, each parameter from the rank that has it."""
    if case.layout.world_size == 1:
        return train(0, case)
    found = run_ranks(case.layout.world_size, train, case)
    assert all(one["losses"] == found[0]["losses"] for one in found)
    return found[0] | {"state": {name: value for one in found for name, value in one["state"].items()}}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["state"].keys() == other["state"].keys()
    assert all(torch.equal(value, other["state"][name]) for name, value in one["state"].items())


def by_hand(norm: bool) -> dict[str, Any]:
    """Plain PyTorch: each layer in turn from its own seed, microbatch by microbatch, and one AdamW."""
    model = layers(norm)
    parameters = [p for layer in model for p in layer.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=0.05, betas=(PLAIN.beta1, PLAIN.beta2), eps=PLAIN.eps, weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        for layer in model:
            layer.train()
        total = torch.zeros(())
        weight = sum(int((m["labels"] >= 0).sum()) for m in split(batch(step), SPLIT).microbatches)
        for number, microbatch in enumerate(split(batch(step), SPLIT).microbatches):
            x = microbatch["tokens"]
            for i, layer in enumerate(model):
                Randomness(EngineOptions().seed, step, 0, number, x.device).begin(f"layers.{i}")
                x = layer(x)
            loss = cross_entropy_sum(x, microbatch["labels"]) * (1.0 / weight)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    state = {f"layers.{i}.{name}": value for i, layer in enumerate(model) for name, value in layer.state_dict().items()}
    return {"losses": losses, "state": state}


LAYOUTS = [
    Case(Layout()),
    Case(Layout(), recompute="full"),
    Case(Layout(pp=2), "zb-h1", "full"),
    Case(Layout(pp=3), "afab"),
    Case(Layout(pp=2), "zb-v"),
]


@pytest.mark.shows(101)
@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "batch norm"])
def test_dropout_and_statistics_are_those_of_plain_pytorch_in_any_layout_with_evaluations_or_without(
    norm: bool,
) -> None:
    expected = by_hand(norm)
    assert len(set(expected["losses"])) == STEPS
    alone = together(replace(LAYOUTS[0], norm=norm))
    torch.testing.assert_close(alone["losses"], expected["losses"], rtol=1e-6, atol=0)
    assert alone["state"].keys() == expected["state"].keys()
    for name, value in alone["state"].items():
        torch.testing.assert_close(value, expected["state"][name], rtol=1e-4, atol=1e-6, msg=name)
    for case in LAYOUTS:
        found = together(replace(case, norm=norm, evaluates=True))
        assert_same(found, alone)
        assert len(found["evaluations"]) == STEPS
        assert all(first == second for first, second in found["evaluations"]), "dropout is off"


@pytest.mark.shows(101)
def test_dropout_is_on_in_training_and_another_for_each_step_microbatch_and_layer() -> None:
    source = Randomness(0, 0, 0, 0, torch.device("cpu"))
    others = [replace(source, **{name: 1}) for name in ("seed", "step", "place", "microbatch")]
    seeds = []
    for randomness, unit in [(source, "layers.2"), *((one, "layers.1") for one in (source, *others))]:
        randomness.begin(unit)
        seeds.append(torch.initial_seed())
    assert len(set(seeds)) == len(seeds)
