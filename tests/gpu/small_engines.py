"""Small engines, dense and with experts, and what steps leave of them, for comparison between devices and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.model import decoder_units
from penstock.settings import ExpertConfig, LearningRate, ModelConfig, OptimizerConfig, Precision

# Heads of 64, as the kernels of 16 bit want them; a text of 300 tokens is longer than a block of theirs.
DENSE = ModelConfig(256, 256, 512, 4, 4, num_kv_heads=2, max_length=512)
EXPERTS = ModelConfig(
    *(256, 256, 512, 4, 4),
    num_kv_heads=2,
    max_length=512,
    experts=ExpertConfig(8, 2, 64, shared_size=64, num_dense_first=1, microbatch_loss=0.01, z_loss=1e-3),
)
LENGTHS = (300, 64, 64, 1, 129, 33, 90, 7)
SPEC = MicroBatchSpec(num=4)


def texts(lengths: Sequence[int] = LENGTHS) -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    return PackedBatch.from_documents([torch.randint(0, 256, (n,), generator=generator) for n in lengths])


def made(
    device: str,
    schedule: str = "1f1b",
    config: ModelConfig = DENSE,
    precision: Precision = Precision.FP32,
    **more: Any,
) -> Engine:
    optimizer = OptimizerConfig(LearningRate(1e-3), clip_norm=1.0)
    options = EngineOptions(schedule, precision=precision, device=device, optimizer=optimizer)  # pyright: ignore
    return Engine(decoder_units(config), config.hidden_size, options=options, **more)


@dataclass(frozen=True, eq=False)
class Steps:
    """Losses of two steps; the first one's gradients and the last one's weights, by name and on the host."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def check_bits(self, other: Steps) -> None:
        """Raises: AssertionError naming what has other bits."""
        assert other.losses == self.losses
        for mine, theirs in ((self.gradients, other.gradients), (self.weights, other.weights)):
            assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []

    def check_close(self, other: Steps, limit: float) -> None:
        """Raises: AssertionError where a gradient, or its step, differs by more than this share of its norm."""
        assert other.losses == pytest.approx(self.losses, rel=limit)
        for name, mine in self.gradients.items():
            difference = float((mine.double() - other.gradients[name].double()).norm())
            assert difference <= limit * max(float(mine.double().norm()), 1e-9), name


def taken(engine: Engine, batch: PackedBatch | None = None) -> Steps:
    """Two steps of an engine, which is closed."""
    batch = texts() if batch is None else batch
    losses = [engine.train_batch(batch, micro_batches=SPEC).loss]
    gradients = {name: engine.gradient(name).cpu() for name in engine.parameters()}
    losses.append(engine.train_batch(batch, micro_batches=SPEC).loss)
    weights = {name: parameter.detach().cpu() for name, parameter in engine.parameters().items()}
    engine.close()
    return Steps(losses, gradients, weights)
