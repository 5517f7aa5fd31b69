"""Penstock: a pipeline-parallel engine whose schedules are built, proved, simulated and drawn before they run.

Nothing heavy is imported here, so that `from penstock import schedule` works without PyTorch; the names below are
fetched from their rooms when first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.data import NO_LABEL, Extent, MicroBatchSpec, PackedBatch
    from penstock.engine import (
        CheckpointError,
        EarlyStop,
        Engine,
        EngineOptions,
        GenerateOptions,
        Metric,
        PerToken,
        Trackers,
        TrainResult,
        ZeroLossWeight,
        token_scores,
    )
    from penstock.settings import (
        ConfigError,
        DataConfig,
        Decay,
        Layout,
        LearningRate,
        ModelConfig,
        Normalize,
        OptimizerConfig,
        ParallelConfig,
        Precision,
        RunConfig,
        SamplingParams,
        ScheduleConfig,
        TrainConfig,
        WeightDecay,
        read_config,
    )

__version__ = "0.1.0"
__all__ = [
    "NO_LABEL",
    "CheckpointError",
    "ConfigError",
    "DataConfig",
    "Decay",
    "EarlyStop",
    "Engine",
    "EngineOptions",
    "Extent",
    "GenerateOptions",
    "Layout",
    "LearningRate",
    "Metric",
    "MicroBatchSpec",
    "ModelConfig",
    "Normalize",
    "OptimizerConfig",
    "PackedBatch",
    "ParallelConfig",
    "PerToken",
    "Precision",
    "RunConfig",
    "SamplingParams",
    "ScheduleConfig",
    "Trackers",
    "TrainConfig",
    "TrainResult",
    "WeightDecay",
    "ZeroLossWeight",
    "__version__",
    "read_config",
    "token_scores",
]

_NAMES_OF = {
    "penstock.data": ("NO_LABEL", "Extent", "MicroBatchSpec", "PackedBatch"),
    "penstock.engine": (
        *("EarlyStop", "Trackers"),
        *("CheckpointError", "Engine", "EngineOptions", "GenerateOptions", "Metric", "PerToken"),
        *("TrainResult", "ZeroLossWeight", "token_scores"),
    ),
    "penstock.settings": (
        *("ConfigError", "DataConfig", "Decay", "Layout", "LearningRate", "ModelConfig", "Normalize"),
        *("OptimizerConfig", "ParallelConfig", "Precision", "RunConfig", "SamplingParams", "ScheduleConfig"),
        *("TrainConfig", "WeightDecay", "read_config"),
    ),
}
_ROOM_OF = {name: room for room, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    """Fetch a public name from its room."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])
