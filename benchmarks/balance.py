"""How evenly experts are used, and their loss beside that of one MLP of the same active size.

Three small models that differ only in their MLPs train on the built-in corpus, in the same batches: experts whose
router has a bias that evens them out, experts without it, and a dense model.
"""

import argparse
import statistics
import sys
from typing import Any

import torch

from benchmarks.common import main, new_parser, progress, spread
from penstock.cli.options import Parser
from penstock.data import DataShard
from penstock.engine.engine import Engine
from penstock.engine.folders.run_check import check_run
from penstock.engine.folders.run_parts import engine_arguments, micro_batches
from penstock.engine.run_data import RunData
from penstock.settings import RunConfig, from_dict

LARGEST_ALLOWED = 1.5
"""Tokens of the busiest expert over the mean of its layer, with the bias."""

_NUM_LAST = 20
"""Last steps over which figures are taken; a single step has too few tokens to judge by."""


_NUM_EXPERTS, _NUM_ACTIVE, _EXPERT_SIZE, _BIAS_STEP = 8, 2, 64, 3e-3
_ACTIVE_SIZE = _NUM_ACTIVE * _EXPERT_SIZE
"""Width inside the MLPs that a token goes through."""


def _config(given: argparse.Namespace, experts: bool, bias: bool) -> RunConfig:
    """A run of one process."""
    settings: dict[str, Any] = {
        "model": {
            "hidden_size": 64,
            "intermediate_size": _ACTIVE_SIZE,
            "num_layers": 2,
            "num_heads": 4,
            "max_length": 128,
        },
        "data": {"sequence_length": 128, "num_sequences": 16},
        "optimizer": {"learning_rate": 4e-3, "num_warmup_steps": min(20, given.steps - 1)},
        "parallel": {"device": "cpu"},
        "train": {"steps": given.steps, "num_microbatches": 2, "seed": given.seed},
        "validation": {"num_sequences": 64},
    }
    if experts:
        settings["experts"] = {
            "num_experts": _NUM_EXPERTS,
            "num_active": _NUM_ACTIVE,
            "intermediate_size": _EXPERT_SIZE,
            "bias_step": _BIAS_STEP if bias else 0.0,
        }
    return check_run(from_dict(settings))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Losses, in nats per token, and the busiest expert's load over the mean: with bias, without, dense."""
    torch.set_num_threads(1)
    data = RunData.load(_config(given, experts=False, bias=False))
    found: dict[str, Any] = {"steps": given.steps, "active_size": _ACTIVE_SIZE}
    for name, experts, bias in (("with_bias", True, True), ("without_bias", True, False), ("dense", False, False)):
        found[name] = _train(_config(given, experts, bias), data)
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


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("balance", __doc__, "--steps 400 --seed 1")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and data")
    return parser


if __name__ == "__main__":
    sys.exit(main("balance"))
