"""Balance of experts, and the loss of a model with experts beside a dense one of the same active size."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.ranks import spread
from penstock.data import DataShard
from penstock.engine.engine import Engine
from penstock.engine.folders.run_check import check
from penstock.engine.folders.run_parts import RunData, engine_arguments, micro_batches
from penstock.settings import RunConfig, from_dict

LARGEST_ALLOWED = 1.5
"""Tokens of the busiest expert over the mean of its layer, with the bias."""

_NUM_LAST = 20
"""Last steps over which figures are taken; a single step has too few tokens to judge by."""


@dataclass(frozen=True)
class Learning:
    """Small models that differ only in their MLPs, on the built-in corpus, in the same batches."""

    num_steps: int = 200
    num_layers: int = 2
    hidden_size: int = 64
    num_experts: int = 8
    num_active: int = 2
    expert_size: int = 64
    bias_step: float = 3e-3
    seed: int = 0

    @property
    def active_size(self) -> int:
        """Width inside the MLPs that a token goes through."""
        return self.num_active * self.expert_size

    def config(self, experts: bool, bias: bool) -> RunConfig:
        """A run of one process."""
        settings: dict[str, Any] = {
            "model": {
                "hidden_size": self.hidden_size,
                "intermediate_size": self.active_size,
                "num_layers": self.num_layers,
                "num_heads": 4,
                "max_length": 128,
            },
            "data": {"sequence_length": 128, "num_sequences": 16},
            "optimizer": {"learning_rate": 4e-3, "num_warmup_steps": min(20, self.num_steps - 1)},
            "parallel": {"device": "cpu"},
            "train": {"steps": self.num_steps, "num_microbatches": 2, "seed": self.seed},
            "validation": {"num_sequences": 64},
        }
        if experts:
            settings["experts"] = {
                "num_experts": self.num_experts,
                "num_active": self.num_active,
                "intermediate_size": self.expert_size,
                "bias_step": self.bias_step if bias else 0.0,
            }
        return check(from_dict(settings))


def measure(learning: Learning | None = None, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure losses, in nats per token, and the busiest expert's load over the mean: with bias, without, dense."""
    learning = learning or Learning()
    torch.set_num_threads(1)
    data = RunData.load(learning.config(experts=False, bias=False))
    found: dict[str, Any] = {"steps": learning.num_steps, "active_size": learning.active_size}
    for name, experts, bias in (("with_bias", True, True), ("without_bias", True, False), ("dense", False, False)):
        found[name] = _train(learning.config(experts, bias), data)
        progress(f"{name}: {found[name]}")
    found["busiest_expert_allowed"] = LARGEST_ALLOWED
    return found


def _train(config: RunConfig, data: RunData) -> dict[str, Any]:
    engine = Engine(*engine_arguments(config, data.corpus.vocab_size))
    try:
        return _figures(engine, config, data)
    finally:
        engine.close()


def _figures(engine: Engine, config: RunConfig, data: RunData) -> dict[str, Any]:
    loader, spec = data.loader(DataShard()), micro_batches(config)
    taken = [engine.train_batch(next(loader), micro_batches=spec) for _ in range(config.train.steps)][-_NUM_LAST:]
    figures: dict[str, Any] = {
        "training_loss": statistics.mean(result.loss for result in taken),
        "validation_loss": engine.evaluate(data.validation(DataShard()), micro_batches=spec),
    }
    busiest = [result.aux_losses.busiest_expert for result in taken if result.aux_losses.busiest_expert is not None]
    if busiest:
        figures["busiest_expert"] = spread(busiest)
    return figures
