"""The engine room: one engine trains, scores and generates; its settings, optimizer, checkpoints and metrics.

The names below are imported on first use, so that settings can be read and refused without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.checkpoint import CheckpointError
    from penstock.engine.comparison import CheckReport, check
    from penstock.engine.engine import Engine
    from penstock.engine.generation.answers import GenerateOptions
    from penstock.engine.options import EngineOptions
    from penstock.engine.training.loss import (
        EvaluationLoss,
        ZeroLossWeight,
        labelled_rows,
        num_loss_tokens,
        token_cross_entropy,
    )
    from penstock.engine.training.metrics import Metric, MetricReduction
    from penstock.engine.training.scorer import PerToken, token_scores
    from penstock.engine.training.trainer import TrainResult
    from penstock.engine.watch import EarlyStop, Trackers

__all__ = [
    "CheckReport",
    "CheckpointError",
    "EarlyStop",
    "Engine",
    "EngineOptions",
    "EvaluationLoss",
    "GenerateOptions",
    "Metric",
    "MetricReduction",
    "PerToken",
    "Trackers",
    "TrainResult",
    "ZeroLossWeight",
    "check",
    "labelled_rows",
    "num_loss_tokens",
    "token_cross_entropy",
    "token_scores",
]

_FILE_OF = {
    "EarlyStop": "watch",
    "Trackers": "watch",
    "CheckReport": "comparison",
    "CheckpointError": "checkpoint",
    "Engine": "engine",
    "EngineOptions": "options",
    "EvaluationLoss": "training.loss",
    "GenerateOptions": "generation.answers",
    "Metric": "training.metrics",
    "MetricReduction": "training.metrics",
    "PerToken": "training.scorer",
    "TrainResult": "training.trainer",
    "ZeroLossWeight": "training.loss",
    "check": "comparison",
    "labelled_rows": "training.loss",
    "num_loss_tokens": "training.loss",
    "token_cross_entropy": "training.loss",
    "token_scores": "training.scorer",
}


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'penstock.engine' has no attribute {name!r}")
    return getattr(import_module(f"penstock.engine.{_FILE_OF[name]}"), name)
