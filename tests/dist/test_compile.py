"""Compiled layers: once per kind, and the same bits in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.model import decoder_units
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig, WeightDecay
from tests.covering import EVERY
from tests.dist.launch import run_ranks
from tests.hugging_face import make_model

# A minute of a core, of tracing and of the C++ compiler.
pytestmark = pytest.mark.subject("src/penstock/**/*.py")

WIDTH, VOCAB = 16, 32
PLAIN = OptimizerConfig(LearningRate(0.02), weight_decay=WeightDecay(0.0), clip_norm=0.0)
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_layers=3, num_heads=2, num_kv_heads=2, max_length=64
)


class Block(nn.Module):
    """Layers of one kind, each with a number of its own that its code depends on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norm, self.dropout = number, nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(self.norm(x))) * (1.0 + self.number)
        return x + self.dropout(self.down(h))


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str = "1f1b"
    recompute: str = "none"


def make(model: str, options: EngineOptions, layout: Layout, folder: Path) -> Engine:
    if model == "own":
        torch.manual_seed(0)
        layers = [nn.Embedding(VOCAB, WIDTH), *(Block(i % 2) for i in range(4)), nn.Linear(WIDTH, VOCAB)]
        return Engine.from_layers(layers, WIDTH, layout, options)
    if model == "native":
        return Engine(lambda groups: decoder_units(CONFIG, groups=groups), WIDTH, layout, options)
    return Engine.from_hf(folder, layout, options, native=False)


Trained = tuple[list[float], dict[str, Tensor]]


def train(rank: int, model: str, case: Case, compiles: bool, folder: Path) -> Trained:
    """The losses of two steps and perhaps of an evaluation, and the final weights of this rank."""
    torch._dynamo.reset()
    options = EngineOptions(
        schedule=case.schedule, recompute=case.recompute, compile=compiles, optimizer=PLAIN, device="cpu"
    )
    engine = make(model, options, case.layout, folder)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for step in range(2):
        # Other lengths are compiled once more; one kind shows that.
        lengths = (9, 4, 6, 12) if model == "native" or EVERY else (7, 7, 7, 7)
        batch = PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths])
        losses.append(engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4)).loss)
        # Layers compiled for evaluation are others; one kind shows them.
        if step == 0 and (model == "own" or EVERY):
            losses.append(float(engine.evaluate([batch], micro_batches=MicroBatchSpec(num=4))))
    if compiles:
        compiled = [
            m
            for s in engine.pipeline.model.stages.values()
            for _, m in s.units
            if any(part._compiled_call_impl is not None for part in m.modules())
        ]
        assert compiled
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    engine.close()
    engine.grid.close()
    return losses, weights


CASES: dict[str, list[Case]] = {
    "own": [Case(Layout(pp=2), "combined-1f1b", "full"), *([Case(Layout(pp=2), "zb-h1")] if EVERY else [])],
    "native": [Case(Layout(pp=2), "zb-h1", "full" if EVERY else "none")],
    "transformers": [Case(Layout(pp=2))],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of transformers."""
    found = tmp_path_factory.mktemp("model")
    make_model("gpt2", vocab_size=VOCAB, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).save_pretrained(found)
    return found


def train_all(rank: int, folder: Path) -> dict[str, list[Trained]]:
    return {model: [train(rank, model, case, True, folder) for case in cases] for model, cases in CASES.items()}


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Trained]:
    """What one process makes of every model."""
    return {model: train(0, model, Case(Layout()), True, folder) for model in CASES}


@pytest.fixture(scope="module")
def by_rank(alone: dict[str, Trained], folder: Path) -> list[dict[str, list[Trained]]]:
    """What two ranks make of every model's cases; what is compiled already they find in torch's cache."""
    return run_ranks(2, train_all, folder, timeout_s=300.0)


@pytest.mark.shows(115)
@pytest.mark.parametrize("model", CASES)
def test_compiled_layers_give_the_same_bits_in_every_layout_and_nearly_those_of_layers_as_they_are(
    model: str, folder: Path, alone: dict[str, Trained], by_rank: list[dict[str, list[Trained]]]
) -> None:
    losses, weights = alone[model]
    if model != "own":
        # Compiled dropout draws other numbers.
        plain, _ = train(0, model, Case(Layout()), False, folder)
        assert losses == pytest.approx(plain, rel=1e-3)
    for number, case in enumerate(CASES[model]):
        ranks = [found[model][number] for found in by_rank]
        assert all(found[0] == losses for found in ranks), case
        together: dict[str, Any] = {name: weight for _, part in ranks for name, weight in part.items()}
        assert together.keys() == weights.keys()
        assert all(torch.equal(weight, weights[name]) for name, weight in together.items()), case
