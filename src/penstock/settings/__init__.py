"""Every setting, declared once: name, type, default, bounds and a sentence of help. Standard library only.

The file, the command line, its help, the checks and the engine all take these very objects. `SETTINGS` lists those of
a run; `walk_settings` those of any object.

A file of this room is loaded when the first of its names is asked for, so that schedules, which need few, load quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.settings.data import DataConfig as DataConfig
    from penstock.settings.data import PackingKind as PackingKind
    from penstock.settings.declare import ConfigError as ConfigError
    from penstock.settings.declare import Setting as Setting
    from penstock.settings.declare import Settings as Settings
    from penstock.settings.declare import checked as checked
    from penstock.settings.declare import same_as as same_as
    from penstock.settings.declare import setting as setting
    from penstock.settings.declare import walk_settings as walk_settings
    from penstock.settings.layout import AXES as AXES
    from penstock.settings.layout import ContextForm as ContextForm
    from penstock.settings.layout import Coordinates as Coordinates
    from penstock.settings.layout import Device as Device
    from penstock.settings.layout import Groups as Groups
    from penstock.settings.layout import Layout as Layout
    from penstock.settings.layout import ParallelConfig as ParallelConfig
    from penstock.settings.layout import TransportKind as TransportKind
    from penstock.settings.model import AdapterConfig as AdapterConfig
    from penstock.settings.model import ExpertConfig as ExpertConfig
    from penstock.settings.model import GroupScore as GroupScore
    from penstock.settings.model import ModelConfig as ModelConfig
    from penstock.settings.model import Native as Native
    from penstock.settings.model import RopeKind as RopeKind
    from penstock.settings.model import RopeScaling as RopeScaling
    from penstock.settings.model import Scores as Scores
    from penstock.settings.optimizer import Arguments as Arguments
    from penstock.settings.optimizer import Decay as Decay
    from penstock.settings.optimizer import Division as Division
    from penstock.settings.optimizer import LearningRate as LearningRate
    from penstock.settings.optimizer import OptimizerConfig as OptimizerConfig
    from penstock.settings.optimizer import OptimizerName as OptimizerName
    from penstock.settings.optimizer import ParameterGroup as ParameterGroup
    from penstock.settings.optimizer import Ramp as Ramp
    from penstock.settings.optimizer import WeightDecay as WeightDecay
    from penstock.settings.run import SETTINGS as SETTINGS
    from penstock.settings.run import CheckpointConfig as CheckpointConfig
    from penstock.settings.run import CompileMode as CompileMode
    from penstock.settings.run import LogConfig as LogConfig
    from penstock.settings.run import Normalize as Normalize
    from penstock.settings.run import Precision as Precision
    from penstock.settings.run import Recompute as Recompute
    from penstock.settings.run import RunConfig as RunConfig
    from penstock.settings.run import TrainConfig as TrainConfig
    from penstock.settings.run import ValidationConfig as ValidationConfig
    from penstock.settings.run import WatchConfig as WatchConfig
    from penstock.settings.run import check_rates as check_rates
    from penstock.settings.run import check_sections as check_sections
    from penstock.settings.run import differences as differences
    from penstock.settings.run import from_dict as from_dict
    from penstock.settings.run import read_config as read_config
    from penstock.settings.sampling import LogitBias as LogitBias
    from penstock.settings.sampling import RingConfig as RingConfig
    from penstock.settings.sampling import SamplingParams as SamplingParams
    from penstock.settings.schedule import ScheduleConfig as ScheduleConfig
    from penstock.settings.schedule import SearchedPlacement as SearchedPlacement
    from penstock.settings.serving import InferenceConfig as InferenceConfig
    from penstock.settings.serving import Quantize as Quantize
    from penstock.settings.serving import ServeConfig as ServeConfig

# Each file after those that it imports.
_FILES = ("declare", "layout", "schedule", "optimizer", "model", "sampling", "serving", "data", "run")


def __getattr__(name: str) -> Any:
    """Fetch a public name from the first file that has it."""
    if not name.startswith("_"):
        for file in _FILES:
            names = vars(import_module(f"{__name__}.{file}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
