"""A user's own modules: their modes, their random numbers and their buffers, in every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import split
from penstock.engine import EngineOptions
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.own_layers import units_of_layers
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
    for stage in engine.pipeline.stages.values():
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
    seeds = [one.unit_seed("layers.1") for one in (source, *others)] + [source.unit_seed("layers.2")]
    assert len(set(seeds)) == len(seeds)


# ---- buffers


def normed(layout: Layout) -> Engine:
    """An engine whose layers have running statistics; ranks that share a model over tp hold them whole."""
    options = EngineOptions(optimizer=PLAIN, device="cpu")
    return Engine(lambda groups: units_of_layers(layers(norm=True)), WIDTH, layout, options)


def save(rank: int, layout: Layout, folder: Path) -> dict[str, Tensor]:
    """Train a little, save, and give the state that this rank has."""
    engine = normed(layout)
    parts = batch(0).split_with([2, 3]) if layout.dp > 1 else (batch(0),)
    if layout.tp == 1:
        engine.train_batch(parts[engine.grid.dp_rank], micro_batches=MicroBatchSpec(num=2))
    else:
        # These layers need all rows, of which each rank of a tp group has a part: their state alone counts here.
        for number, buffer in enumerate(engine.buffers().values()):
            buffer.copy_(torch.arange(WIDTH) + number if buffer.ndim else torch.tensor(2))
    saved = Checkpointer(folder, engine.grid, {}, aliases=engine.ties)
    saved.save(engine.step, engine.state(), engine.progress(), wait=True)
    assert set(engine.buffers()) <= set(engine.state())
    return {name: buffer.clone() for name, buffer in engine.buffers().items()}


def load(rank: int, layout: Layout, folder: Path) -> dict[str, Tensor]:
    """The buffers of an engine that has loaded."""
    engine = normed(layout)
    saved = Checkpointer(folder, engine.grid, {}, aliases=engine.ties)
    found = saved.latest()
    assert found is not None
    saved.load(found, engine.state())
    return {name: buffer.clone() for name, buffer in engine.buffers().items()}


@pytest.mark.shows(102)
@pytest.mark.parametrize("first", [Layout(pp=2, dp=2), Layout(tp=2)], ids=str)
def test_buffers_are_saved_and_loaded_in_any_layout_and_equal_on_ranks_that_hold_the_same(
    first: Layout, tmp_path: Path
) -> None:
    by_rank = run_ranks(first.world_size, save, first, tmp_path)
    saved: dict[str, Tensor] = {}
    for one in by_rank:
        for name, value in one.items():
            assert torch.equal(saved.setdefault(name, value), value), name
    assert {name.rpartition(".")[2] for name in saved} == {"running_mean", "running_var", "num_batches_tracked"}
    assert len(saved) == 9
    assert all(int(value) == 2 for name, value in saved.items() if name.endswith("tracked"))
    for second in (Layout(), Layout(pp=3), Layout(tp=2)):
        every = (
            [load(0, second, tmp_path)]
            if second.world_size == 1
            else run_ranks(second.world_size, load, second, tmp_path)
        )
        assert {name for one in every for name in one} == set(saved)
        assert all(torch.equal(value, saved[name]) for one in every for name, value in one.items())
