"""The engine room: one engine trains, scores and generates; its settings, optimizer, checkpoints and metrics.

The names below are imported on first use, so that settings can be read and refused without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.answers import GenerateOptions
    from penstock.engine.checkpoint import CheckpointError
    from penstock.engine.engine import Engine
    from penstock.engine.loss_metrics import EvaluationLoss, Metric, MetricReduction
    from penstock.engine.losses import ZeroLossWeight, num_loss_tokens, token_cross_entropy
    from penstock.engine.options import EngineOptions
    from penstock.engine.scorer import PerToken, token_scores
    from penstock.engine.trackers import Trackers
    from penstock.engine.trainer import TrainResult
    from penstock.engine.watch import EarlyStop

__all__ = [
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
    "num_loss_tokens",
    "token_cross_entropy",
    "token_scores",
]

_FILE_OF = {
    "EarlyStop": "watch",
    "Trackers": "trackers",
    "CheckpointError": "checkpoint",
    "Engine": "engine",
    "EngineOptions": "options",
    "EvaluationLoss": "loss_metrics",
    "GenerateOptions": "answers",
    "Metric": "loss_metrics",
    "MetricReduction": "loss_metrics",
    "PerToken": "scorer",
    "TrainResult": "trainer",
    "ZeroLossWeight": "losses",
    "num_loss_tokens": "losses",
    "token_cross_entropy": "losses",
    "token_scores": "scorer",
}


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'penstock.engine' has no attribute {name!r}")
    return getattr(import_module(f"penstock.engine.{_FILE_OF[name]}"), name)
