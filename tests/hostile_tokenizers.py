"""Tokenizers that fail on some texts."""

import json
from pathlib import Path
from typing import Any

from penstock.data.tokenizer import byte_level_alphabet

_ALPHABET = {letter: place for place, letter in enumerate(byte_level_alphabet())}
_BACKTRACKS = {"Regex": r"(?:(?:a|aa)+)+$"}


def _of(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": _ALPHABET, "merges": [], "byte_fallback": False},
    }  # fmt: skip
    return usual | changes


MANY = "a" * 40 + "!"
"""A text on which each of these fails."""

PANICS: dict[str, dict[str, Any]] = {
    "a pattern that backtracks": _of(
        pre_tokenizer={"type": "Split", "pattern": _BACKTRACKS, "behavior": "Isolated", "invert": False}
    ),
    "one of a normalizer": _of(
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": _BACKTRACKS, "content": ""}],
        }
    ),
}
"""Tokenizers whose library panics where it reads."""


def write(folder: Path, content: dict[str, Any]) -> Path:
    """The tokenizer in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
