"""Penstock: a pipeline-parallel engine whose schedules are built, proved, simulated and drawn before they run.

Nothing heavy is imported here, so that `from penstock import schedule` works without PyTorch; the names below are
fetched from their rooms when first asked for.
"""

import os
import sys
from importlib import import_module
from itertools import takewhile
from time import sleep
from traceback import extract_tb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from penstock.data import NO_LABEL, BatchError, Extent, MicroBatchSpec, PackedBatch
    from penstock.engine import (
        CheckpointError,
        EarlyStop,
        Engine,
        EngineOptions,
        GenerateOptions,
        Metric,
        MetricReduction,
        PerToken,
        Trackers,
        TrainResult,
        ZeroLossWeight,
        labelled_rows,
        num_loss_tokens,
        token_cross_entropy,
        token_scores,
    )
    from penstock.engine.check import CheckReport, check
    from penstock.model import Labels
    from penstock.runtime import CallbackError, PipelineError, StepError, TransportError
    from penstock.settings import (
        ConfigError,
        ContextForm,
        DataConfig,
        Decay,
        Layout,
        LearningRate,
        ModelConfig,
        Normalize,
        OptimizerConfig,
        ParallelConfig,
        ParameterGroup,
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
    "BatchError",
    "CallbackError",
    "CheckReport",
    "CheckpointError",
    "ConfigError",
    "ContextForm",
    "DataConfig",
    "Decay",
    "EarlyStop",
    "Engine",
    "EngineOptions",
    "Extent",
    "GenerateOptions",
    "Labels",
    "Layout",
    "LearningRate",
    "Metric",
    "MetricReduction",
    "MicroBatchSpec",
    "ModelConfig",
    "Normalize",
    "OptimizerConfig",
    "PackedBatch",
    "ParallelConfig",
    "ParameterGroup",
    "PerToken",
    "PipelineError",
    "Precision",
    "RunConfig",
    "SamplingParams",
    "ScheduleConfig",
    "StepError",
    "Trackers",
    "TrainConfig",
    "TrainResult",
    "TransportError",
    "WeightDecay",
    "ZeroLossWeight",
    "__version__",
    "check",
    "labelled_rows",
    "num_loss_tokens",
    "read_config",
    "token_cross_entropy",
    "token_scores",
]

_NAMES_OF = {
    "penstock.data": ("NO_LABEL", "BatchError", "Extent", "MicroBatchSpec", "PackedBatch"),
    "penstock.engine": (
        *("EarlyStop", "Trackers"),
        *("CheckpointError", "Engine", "EngineOptions", "GenerateOptions", "Metric", "PerToken"),
        *("MetricReduction", "TrainResult", "ZeroLossWeight"),
        *("labelled_rows", "num_loss_tokens", "token_cross_entropy", "token_scores"),
    ),
    "penstock.engine.check": ("CheckReport", "check"),
    "penstock.model": ("Labels",),
    "penstock.runtime": ("CallbackError", "PipelineError", "StepError", "TransportError"),
    "penstock.settings": (
        *("ConfigError", "DataConfig", "Decay", "Layout", "LearningRate", "ModelConfig", "Normalize"),
        *("OptimizerConfig", "ParallelConfig", "Precision", "RunConfig", "SamplingParams", "ScheduleConfig"),
        *("ContextForm", "ParameterGroup", "TrainConfig", "WeightDecay", "read_config"),
    ),
}
_ROOM_OF = {name: room for room, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    """Fetch a public name from its room, or the room of schedules."""
    if name == "schedule":
        return import_module("penstock.schedule")
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])


def _tell(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """Print an exception that ends this process: whole, or where another rank has failed in one line."""
    if getattr(error, "is_of_other_rank", False):
        *_, call = takewhile(lambda call: not call.filename.startswith(__path__[0]), extract_tb(trace))
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        sys.stderr.write(f"{kind.__name__}: {said} ({call.filename}, line {call.lineno})\n")
        # Agents of torchrun begin their report with whoever ends first.
        sleep(_LINGER_S)
        return
    sys.__excepthook__(kind, error, trace)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error
        except BaseException:
            get_error_handler().record_exception(error)


_LINGER_S = 1.0

# One of the user's own stands; torch's only puts the rank before each line, and comes with the process group.
if sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__ == "torch.distributed.distributed_c10d":
    sys.excepthook = _tell
