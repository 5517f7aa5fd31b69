"""The engine room: one engine trains, scores and generates; its settings, optimizer, checkpoints and metrics.

The names below are imported on first use, so that settings can be read and refused without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.callbacks import EarlyStop as EarlyStop
    from penstock.engine.callbacks import Trackers as Trackers
    from penstock.engine.checkpoint import CheckpointError as CheckpointError
    from penstock.engine.engine import Engine as Engine
    from penstock.engine.generation.options import GenerateOptions as GenerateOptions
    from penstock.engine.options import EngineOptions as EngineOptions
    from penstock.engine.scoring import PerToken as PerToken
    from penstock.engine.scoring import token_scores as token_scores
    from penstock.engine.training.loss import EvaluationLoss as EvaluationLoss
    from penstock.engine.training.loss import ZeroLossWeight as ZeroLossWeight
    from penstock.engine.training.loss import labelled_rows as labelled_rows
    from penstock.engine.training.loss import num_loss_tokens as num_loss_tokens
    from penstock.engine.training.loss import token_cross_entropy as token_cross_entropy
    from penstock.engine.training.metrics import Metric as Metric
    from penstock.engine.training.metrics import MetricReduction as MetricReduction
    from penstock.engine.training.trainer import TrainResult as TrainResult

_NAMES_OF = {
    "callbacks": ("EarlyStop", "Trackers"),
    "checkpoint": ("CheckpointError",),
    "engine": ("Engine",),
    "generation.options": ("GenerateOptions",),
    "options": ("EngineOptions",),
    "scoring": ("PerToken", "token_scores"),
    "training.loss": (
        *("EvaluationLoss", "ZeroLossWeight", "labelled_rows", "num_loss_tokens", "token_cross_entropy"),
    ),
    "training.metrics": ("Metric", "MetricReduction"),
    "training.trainer": ("TrainResult",),
}
_FILE_OF = {name: file for file, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'penstock.engine' has no attribute {name!r}")
    return getattr(import_module(f"penstock.engine.{_FILE_OF[name]}"), name)
