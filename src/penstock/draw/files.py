"""Drawings into files, by the ending of their names."""

from collections.abc import Sequence
from pathlib import Path

from penstock.draw.layers import Layer

ENDINGS = {
    ".svg": "a picture",
    ".png": "a picture",
    ".html": "a page to zoom and to follow microbatches in, with nothing else needed",
    ".json": "a trace for ui.perfetto.dev",
}


def check_ending(path: Path) -> None:
    """Refuse a file whose ending names no format that can be drawn.

    Raises: ValueError naming the endings that can.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"cannot draw {path.name!r}: the file's ending must be one of {', '.join(ENDINGS)}")


def write_drawing(path: Path, layers: Sequence[Layer], *, unit: str = "", command: str = "") -> None:
    """Draw layers into a file, as its ending says; an existing file is overwritten.

    `command` is the one that was asked to; a page names it.

    Raises: ValueError for another ending, or layers that do not go together.
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
