"""How the documentation site reads our docstrings: examples as code, one-line sections with their heads in bold."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1(?! *$).*\n?)*", re.MULTILINE)
_HEAD = re.compile(r"^(Raises|Returns|Source|Note): (?=\S)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring. Called by griffe."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with its examples fenced and its one-line sections marked."""
    fenced = _EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", text + "\n")
    return _HEAD.sub(r"**\1:** ", fenced).rstrip("\n")
