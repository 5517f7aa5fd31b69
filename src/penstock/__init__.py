"""Penstock: a pipeline-parallel engine whose schedules are built, proved, simulated and drawn before they run.

Nothing heavy is imported here, so that `from penstock import schedule` works without PyTorch; the names below are
fetched from their rooms when first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.data import MicroBatchSpec, PackedBatch
    from penstock.engine import Engine
    from penstock.settings import Layout, SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "Layout", "MicroBatchSpec", "PackedBatch", "SamplingParams", "__version__"]

_ROOM_OF = {
    "Engine": "penstock.engine",
    "Layout": "penstock.settings",
    "MicroBatchSpec": "penstock.data",
    "PackedBatch": "penstock.data",
    "SamplingParams": "penstock.settings",
}


def __getattr__(name: str) -> object:
    """Fetch a public name from its room."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOM_OF])
