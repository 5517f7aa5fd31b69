"""Texts to score: a JSON object a line, as text or as token ids, whole or divided into prompt and completion."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.tokenizer import Tokenizer
from penstock.engine.saved_model import SavedModel

_FORMS = '{"text": ...}, {"tokens": [...]} or {"prompt": ..., "completion": ...}'


@dataclass(frozen=True)
class Text:
    """One line: its number from 1, its "id" if it has one, its token ids, and how many of these are the prompt's."""

    line: int
    id: Any
    tokens: Sequence[int]
    num_prompt_tokens: int = 0

    @property
    def num_scored(self) -> int:
        """The tokens that have something before them to be told from, and are not the prompt's."""
        return len(self.tokens) - max(self.num_prompt_tokens, 1)


def read_texts(path: Path, model: SavedModel, text_field: str = "text") -> list[Text]:
    """All lines of a file that the model can score.

    Raises: ValueError naming the line that can not be, and why.
    """
    texts = [_text(path, number, line, model.tokenizer, text_field) for number, line in _lines(path)]
    if not texts:
        raise ValueError(f"{path} has no line to score; a line is {_FORMS}")
    for text in texts:
        where = f"{path}, line {text.line}"
        if not text.tokens:
            raise ValueError(f"{where}: has no token; give at least one")
        if len(text.tokens) > model.max_length:
            raise ValueError(
                f"{where}: has {len(text.tokens)} tokens, but {model.folder} takes at most {model.max_length}"
            )
        outside = next((token for token in text.tokens if not 0 <= token < model.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"{where}: token {outside} is outside the vocabulary of {model.folder}, 0 to {model.vocab_size - 1}"
            )
    return texts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); give JSON lines") from None
    # Not splitlines: that would also cut at separators which JSON allows inside a text.
    return ((number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip())


def _text(path: Path, number: int, line: str, tokenizer: Tokenizer | None, text_field: str) -> Text:
    where = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error.msg}); a line is {_FORMS}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: is a JSON {type(value).__name__}; a line is {_FORMS}")
    if "prompt" in value and "completion" in value:
        prompt, completion = (_tokens(where, name, value[name], tokenizer) for name in ("prompt", "completion"))
        if not completion:
            raise ValueError(f"{where}: its completion is empty; nothing would be scored")
        return Text(number, value.get("id"), [*prompt, *completion], len(prompt))
    for name in ("tokens", text_field):
        if name in value:
            return Text(number, value.get("id"), _tokens(where, name, value[name], tokenizer))
    raise ValueError(f"{where}: has only {', '.join(map(repr, value)) or 'an empty object'}; a line is {_FORMS}")


def _tokens(where: str, name: str, value: Any, tokenizer: Tokenizer | None) -> Sequence[int]:
    """A text's token ids, or the ids as they are given."""
    if isinstance(value, str) and name != "tokens":
        if tokenizer is None:
            raise ValueError(f"{where}: {name!r} is a text, but the model has no tokenizer; give token ids")
        try:
            return tokenizer.encode([value])[0].tolist()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {name!r} can not be written as UTF-8 ({error.reason})") from None
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    wanted = "a list of token ids" if name == "tokens" else "a text or a list of token ids"
    raise ValueError(f"{where}: {name!r} must be {wanted}")
