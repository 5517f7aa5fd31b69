"""Drawings of timelines: in the terminal, or in a file as a picture, a page or a trace.

A timeline is drawn the same way whether it was simulated or measured: one row a rank, one box an action, time to the
right. `in_terminal` prints it, `picture` draws timelines as SVG or PNG, `write_drawing` writes any kind of file.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.draw.layers import ENDINGS, PICTURES, Layer, check_ending

if TYPE_CHECKING:
    from penstock.draw.image import picture
    from penstock.draw.terminal import in_terminal

__all__ = ["ENDINGS", "PICTURES", "Layer", "check_ending", "in_terminal", "picture", "write_drawing"]


def write_drawing(path: Path, layers: Sequence[Layer], *, unit: str = "", command: str = "") -> None:
    """Draw layers into a file in the format of its ending; an existing file is overwritten.

    A page names `command`, which made it.

    Raises: ValueError for an unsupported ending, or layers that cannot be drawn together.
    """
    check_ending(path)
    ending = path.suffix.lower()
    if ending == ".html":
        from penstock.draw.page import write_page

        write_page(path, layers, unit=unit, command=command)
    elif ending == ".json":
        from penstock.draw.perfetto import write_trace

        write_trace(path, layers, unit=unit, command=command)
    else:
        # matplotlib takes a second to load.
        from penstock.draw.image import picture

        picture(path, [layer.timeline for layer in layers], unit=unit)


def __getattr__(name: str) -> object:
    """Import a drawing function on first use; matplotlib takes a second to load, and a terminal does not need it."""
    module = {"in_terminal": "penstock.draw.terminal", "picture": "penstock.draw.image"}.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock.draw' has no attribute {name!r}")
    return getattr(import_module(module), name)
