"""Pictures of timelines: in the terminal, as SVG and as PNG.

A timeline is drawn the same way whether it was simulated or measured: one row a rank, one box an action, time to the
right. `in_terminal` and `picture` are the two ways to see it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.draw.image import picture
    from penstock.draw.terminal import in_terminal

__all__ = ["in_terminal", "picture"]


def __getattr__(name: str) -> object:
    """Fetch a drawing function; matplotlib takes a second to load, and the terminal does without it."""
    module = {"in_terminal": "penstock.draw.terminal", "picture": "penstock.draw.image"}.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock.draw' has no attribute {name!r}")
    return getattr(import_module(module), name)
