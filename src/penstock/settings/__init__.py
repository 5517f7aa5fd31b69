# ruff: noqa: F403
"""Every setting, declared once: name, type, default, bounds and a sentence of help. Standard library only.

The file, the command line, its help, the checks and the engine all take these very objects. `SETTINGS` lists those of
a run; `walk_settings` those of any object.

A file of this room is loaded when the first of its names is asked for, so that schedules, which need few, load quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.settings.data import *
    from penstock.settings.declare import *
    from penstock.settings.layout import *
    from penstock.settings.model import *
    from penstock.settings.optimizer import *
    from penstock.settings.run import *
    from penstock.settings.sampling import *
    from penstock.settings.schedule import *
    from penstock.settings.serving import *

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
