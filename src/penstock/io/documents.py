"""JSON and TOML that a user may have written: parsed within bounds; a fault is one sentence."""

import json
import re
from pathlib import Path
from typing import Any

from penstock.io.files import read_bytes

# Of lists and objects within each other: far beyond any file of ours, and far from where Python gives up.
_MAX_DEPTH = 100
_TOO_DEEP = "it is nested too deeply"
_NESTED = (list, dict)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is none, or it is nested too deeply or has a number too long to be read.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    # Most texts have too few brackets to be deep, and counting is quick. Other encodings than UTF-8 have them, too.
    if sum(map(text.count, brackets)) > _MAX_DEPTH:  # pyright: ignore[reportArgumentType]
        check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Check that parsed values are not nested so deeply that a function which follows them might fail.

    Raises:
        ValueError: they are.
    """
    level = [content]
    for _ in range(_MAX_DEPTH):
        values = (value.values() if isinstance(value, dict) else value for value in level if isinstance(value, _NESTED))
        level = [inner for each in values for inner in each if isinstance(inner, _NESTED)]
    if level:
        raise ValueError(_TOO_DEEP)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ValueError: it holds anything else; names the file.
        OSError: it cannot be opened, or is none to be read whole.
    """
    read = read_bytes(path)
    try:
        content = parse_json(read)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


# ---- TOML


# A name of thousands of parts would keep the parser busy for minutes.
_LONG_NAME = re.compile(r"""(?:^|[{,\[])[ \t]*((?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32})""", re.MULTILINE)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none, or it is nested too deeply.

    >>> parse_toml("a = " + "[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    if long := _LONG_NAME.search(text):
        raise ValueError(f"a name of more than 32 parts, {long[1][:40]!r}...")
    # Imported where it is used: most commands read none.
    import tomllib

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(content)
    return content
