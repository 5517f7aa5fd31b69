"""Tokenizers made to do harm."""

import json
from pathlib import Path
from typing import Any

from penstock.data.tokenizer import byte_level_alphabet

_ALPHABET = {letter: place for place, letter in enumerate(byte_level_alphabet())}
_EXPANDS = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}] * 6
_BACKTRACKS = {"Regex": r"(?:(?:a|aa)+)+$"}


def _of(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": _ALPHABET, "merges": [], "byte_fallback": False},
    }  # fmt: skip
    return usual | changes


def _sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return _of(normalizer={"type": "Sequence", "normalizers": normalizers})


MANY = "a" * 40 + "!"
"""A text on which each of these fails."""

READS: dict[str, tuple[dict[str, Any], str]] = {
    "a normalizer that expands": (_sequence(*_EXPANDS), "it takes more than 1 GiB of memory"),
    "one that makes millions of a letter": (
        _sequence({"type": "Replace", "pattern": {"String": "!"}, "content": "b" * 2_000_000}),
        "it makes 2000040 tokens of 41 characters",
    ),
    "a pattern that backtracks": (
        _of(pre_tokenizer={"type": "Split", "pattern": _BACKTRACKS, "behavior": "Isolated", "invert": False}),
        "retry-limit-in-match over",
    ),
    "one of a normalizer": (
        _sequence({"type": "Replace", "pattern": _BACKTRACKS, "content": ""}), "retry-limit-in-match over"
    ),
}  # fmt: skip
"""Tokenizers that fail where they read, and a part of the reason; the third panics."""

WRITES = _of(
    decoder={
        "type": "Sequence",
        "decoders": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}] * 40,
    }
)
"""One that fails where it writes."""

HUGE = _of(
    added_tokens=[
        {"id": 256, "content": "a" * 500_000, "special": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
)
"""One with an added token of half a million letters."""


def write(folder: Path, content: dict[str, Any]) -> Path:
    """The tokenizer in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
