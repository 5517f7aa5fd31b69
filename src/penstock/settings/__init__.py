"""Every setting, declared once: name, type, default, bounds and a sentence of help. Standard library only.

The file, the command line, its help, the checks and the engine all take these very objects. `SETTINGS` lists those of
a run; `walk_settings` those of any object.

A file of this room is loaded when the first of its names is asked for, so that schedules, which need few, load quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.settings.data import (
        DataConfig,
        PackingKind,
    )
    from penstock.settings.declare import (
        ConfigError,
        Setting,
        Settings,
        checked,
        same_as,
        setting,
        walk_settings,
    )
    from penstock.settings.layout import (
        AXES,
        ContextForm,
        Coordinates,
        Device,
        Groups,
        Layout,
        ParallelConfig,
        TransportKind,
    )
    from penstock.settings.model import (
        AdapterConfig,
        ExpertConfig,
        GroupScore,
        ModelConfig,
        Native,
        RopeKind,
        RopeScaling,
        Scores,
    )
    from penstock.settings.optimizer import (
        Arguments,
        Decay,
        Division,
        LearningRate,
        OptimizerConfig,
        OptimizerName,
        ParameterGroup,
        Ramp,
        WeightDecay,
    )
    from penstock.settings.run import (
        SETTINGS,
        CheckpointConfig,
        CompileMode,
        LogConfig,
        Normalize,
        Precision,
        Recompute,
        RunConfig,
        TrainConfig,
        ValidationConfig,
        WatchConfig,
        check_rates,
        check_sections,
        check_world,
        differences,
        from_dict,
        read_config,
    )
    from penstock.settings.sampling import (
        LogitBias,
        RingConfig,
        SamplingParams,
    )
    from penstock.settings.schedule import (
        ScheduleConfig,
        SearchedPlacement,
    )
    from penstock.settings.serving import (
        InferenceConfig,
        Quantize,
        ServeConfig,
    )

__all__ = [
    "AXES",
    "SETTINGS",
    "AdapterConfig",
    "Arguments",
    "CheckpointConfig",
    "CompileMode",
    "ConfigError",
    "ContextForm",
    "Coordinates",
    "DataConfig",
    "Decay",
    "Device",
    "Division",
    "ExpertConfig",
    "GroupScore",
    "Groups",
    "InferenceConfig",
    "Layout",
    "LearningRate",
    "LogConfig",
    "LogitBias",
    "ModelConfig",
    "Native",
    "Normalize",
    "OptimizerConfig",
    "OptimizerName",
    "PackingKind",
    "ParallelConfig",
    "ParameterGroup",
    "Precision",
    "Quantize",
    "Ramp",
    "Recompute",
    "RingConfig",
    "RopeKind",
    "RopeScaling",
    "RunConfig",
    "SamplingParams",
    "ScheduleConfig",
    "Scores",
    "SearchedPlacement",
    "ServeConfig",
    "Setting",
    "Settings",
    "TrainConfig",
    "TransportKind",
    "ValidationConfig",
    "WatchConfig",
    "WeightDecay",
    "check_rates",
    "check_sections",
    "check_world",
    "checked",
    "differences",
    "from_dict",
    "read_config",
    "same_as",
    "setting",
    "walk_settings",
]

# Each file after those that it imports.
_FILES = ("declare", "layout", "schedule", "optimizer", "model", "sampling", "serving", "data", "run")


def __getattr__(name: str) -> Any:
    """Fetch a public name from the first file that has it."""
    if name in __all__:
        for file in _FILES:
            names = vars(import_module(f"{__name__}.{file}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
