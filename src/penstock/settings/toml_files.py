"""TOML that a user may have written: parsed within bounds; a fault is one sentence."""

import re
import tomllib
from typing import Any

from penstock.settings.json_files import check_depth

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
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(content)
    return content
