"""Prompts to continue: from the command line, JSON lines, or standard input."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.saved_model import SavedModel

_FORMS = '{"prompt": ...} or {"tokens": [...]}'


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids, its text where it was given as one, and of a file's line the number and the "id"."""

    tokens: Sequence[int]
    text: str | None = None
    line: int | None = None
    id: Any = None


def prompts_of_texts(texts: Sequence[str], model: SavedModel) -> list[Prompt]:
    """Prompts given as texts.

    Raises: ValueError where the model has no tokenizer.
    """
    return [Prompt(_tokens(f"prompt {number}", text, model), text) for number, text in enumerate(texts)]


def read_prompts(path: Path, model: SavedModel) -> list[Prompt]:
    """All lines of a file.

    Raises: ValueError naming the line that is no prompt, and why.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); give JSON lines") from None
    # Not splitlines: that would also cut at separators which JSON allows inside a text.
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no line to continue; a line is {_FORMS}")
    return [_prompt(f"{path}, line {number}", number, line, model) for number, line in lines]


def _prompt(where: str, number: int, line: str, model: SavedModel) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error.msg}); a line is {_FORMS}") from None
    given = value if isinstance(value, dict) else {}
    text, tokens = given.get("prompt"), given.get("tokens")
    if isinstance(text, str):
        return Prompt(_tokens(where, text, model), text, number, given.get("id"))
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return Prompt(tokens, None, number, given.get("id"))
    raise ValueError(f"{where}: holds no prompt; a line is {_FORMS}, a text or a list of token ids")


def _tokens(where: str, text: str, model: SavedModel) -> list[int]:
    if model.tokenizer is None:
        raise ValueError(f"{where} is a text, but {model.folder} has no tokenizer; give token ids in a --file")
    try:
        tokens = model.tokenizer.encode([text])[0].tolist()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} can not be written as UTF-8 ({error.reason})") from None
    if not tokens:
        raise ValueError(f"{where} is empty; a model continues what has at least one token")
    return tokens
