"""Stages that give several tensors: whatever the cut and the schedule, bit for bit one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import Extent, split
from penstock.engine import EngineOptions
from penstock.model import Given, Parameters, Sequences, cross_entropy_sum
from penstock.settings import LearningRate, OptimizerConfig, WeightDecay
from tests.dist.launch import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SPLIT = MicroBatchSpec(num=4)
PLAIN = OptimizerConfig(LearningRate(0.05), weight_decay=WeightDecay(0.0), clip_norm=0.0)
STEPS = 2


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str = "1f1b"
    recompute: str = "none"


def example(name: str) -> Any:
    """The example's module, without running it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encoder_decoder() -> tuple[list[nn.Module], int, list[PackedBatch]]:
    own = example("encoder_decoder")
    torch.manual_seed(0)
    encoder, decoder = [own.EncoderLayer() for _ in range(2)], [own.DecoderLayer() for _ in range(3)]
    layers = [own.Read(own.VOCAB, own.WIDTH), *encoder, own.Join(own.VOCAB, own.WIDTH), *decoder]
    generator = torch.Generator().manual_seed(1)
    batches = [own.words(generator) for _ in range(STEPS)]
    return [*layers, own.Write(own.WIDTH, own.VOCAB)], own.WIDTH, batches


def vision_language() -> tuple[list[nn.Module], int, list[PackedBatch]]:
    own = example("vision_language")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    layers = [own.LookAndRead(), own.Block(), own.Block(), own.Block(), nn.Linear(own.WIDTH, own.VOCAB)]
    return layers, own.WIDTH, [own.pictures(generator) for _ in range(STEPS)]


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 6)

    def forward(self, tokens: Tensor, topic: Tensor, sequences: Sequences) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        return {
            "wide": x.repeat(1, 2),
            "x": x,
            # A view of every other number.
            "odd": torch.stack((tokens % 2, tokens), 1)[:, 0],
            "of_items": topic[:, None] * self.embedding.weight[0],
        }


class Middle(nn.Module):
    """Uses a part of what it is given, and hands on the rest; `odd` takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.narrow = nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(
        self, x: Tensor, wide: Tensor, odd: Tensor, of_items: Tensor, sequences: Sequences, scale: float = 0.5
    ) -> dict[str, Tensor]:
        spread = [of_items[i].expand(length, -1) for i, length in enumerate(sequences.lengths)]
        narrow = self.narrow(wide) + torch.cat(spread) * scale
        return {"x": x + self.linear(narrow) * odd[:, None], "wide": wide, "odd": odd, "of_items": of_items}


class Last(nn.Module):
    """Never uses what is wide, whose gradient from here on is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 16)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.linear(x)


def mappings() -> tuple[list[nn.Module], int, list[PackedBatch]]:
    torch.manual_seed(0)
    batches = []
    for _ in range(STEPS):
        lengths = (3, 5, 2, 6, 4)
        batch = PackedBatch.from_documents([torch.randint(0, 16, (n,)) for n in lengths])
        batches.append(batch.with_key("topic", torch.rand(5), Extent.ITEM))
    return [First(), Middle(), Middle(), Last()], 6, batches


MODELS: dict[str, Callable[[], tuple[list[nn.Module], int, list[PackedBatch]]]] = {
    "encoder-decoder": encoder_decoder,
    "vision-language": vision_language,
    "mappings": mappings,
}


def train(rank: int, model: str, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps and one evaluation, and the final weights of this rank."""
    layers, width, batches = MODELS[model]()
    options = EngineOptions(schedule=case.schedule, recompute=case.recompute, optimizer=PLAIN, device="cpu")
    engine = Engine.from_layers(layers, width, case.layout, options)
    losses = [engine.train_batch(batch, micro_batches=SPLIT).loss for batch in batches]
    losses.append(float(engine.evaluate(batches, micro_batches=SPLIT)))
    weights = {name: parameter.detach().clone() for name, parameter in engine.parameters().items()}
    assert engine.pipeline.transport.num_pending() == 0
    engine.close()
    engine.grid.close()
    return losses, weights


def by_hand(model: str) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch: one layer after the other, and one AdamW."""
    layers, _, batches = MODELS[model]()
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, 0.05, (PLAIN.beta1, PLAIN.beta2), PLAIN.eps, weight_decay=0.0)
    losses = []
    for batch in batches:
        total, weight = torch.zeros(()), int((batch["labels"] >= 0).sum())
        for microbatch in split(batch, SPLIT).microbatches:
            x: Any = microbatch["tokens"]
            for layer in layers:
                args, kwargs = Parameters.of(layer).arguments(
                    x, Sequences.from_lengths(microbatch.sequence_lengths()), Given(microbatch.data or {})
                )
                x = layer(*args, **kwargs)
            loss = cross_entropy_sum(x, microbatch["labels"]) * (1.0 / weight)
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"layers.{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}


CASES = {
    "encoder-decoder": [Case(Layout(pp=4), "zb-h1", "full"), Case(Layout(pp=2), "interleaved")],
    "vision-language": [Case(Layout(pp=2)), Case(Layout(pp=4), "zb-h1")],
    "mappings": [Case(Layout(pp=4), "zb-h1"), Case(Layout(pp=2), "1f1b", "full"), Case(Layout(pp=2), "zb-v")],
}


@pytest.mark.shows(105)
@pytest.mark.parametrize("model", MODELS)
def test_several_tensors_between_stages_change_no_bit(model: str) -> None:
    losses, weights = by_hand(model)
    alone, own = train(0, model, Case(Layout()))
    torch.testing.assert_close(alone[:STEPS], losses, rtol=1e-5, atol=0)
    assert own.keys() == weights.keys()
    for name, weight in own.items():
        if name.endswith("kv.bias"):
            # Softmax does not depend on the keys' bias: its gradient is rounding alone, and AdamW makes steps of it.
            continue
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4, msg=name)
    for case in CASES[model]:
        ranks = run_ranks(case.layout.world_size, train, model, case)
        assert all(found[0] == alone for found in ranks), case
        together = {name: weight for _, part in ranks for name, weight in part.items()}
        assert together.keys() == own.keys()
        assert all(torch.equal(weight, own[name]) for name, weight in together.items()), case
