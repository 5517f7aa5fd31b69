"""The input of `penstock score` and `penstock generate`: a saved model, and JSON lines of texts or prompts for it."""

import json
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from penstock.data.examples import Chat, ExampleReader, messages_of, template_options
from penstock.engine.folders.model_folder import ModelFolder, open_model
from penstock.io.files import lines_of, parse_json
from penstock.model.hf.families import GENERATION_CONFIG

_TEXT_FORMS = '{"text": ...}, {"tokens": [...]} or {"prompt": ..., "completion": ...}'
_MOST_SHOWN = 40
_PROMPT_FORMS = '{"prompt": ...} or {"tokens": [...]}'


@dataclass(frozen=True)
class Text:
    """One line to score: its number from 1, its "id" if it has one, its token ids, and how many of these are prompt."""

    line: int
    id: Any
    tokens: Sequence[int]
    num_prompt_tokens: int = 0

    @property
    def num_scored(self) -> int:
        """The tokens that follow another token and are not part of the prompt."""
        return len(self.tokens) - max(self.num_prompt_tokens, 1)


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids, its text if it was given as text, and the line and "id" if it came from a file."""

    tokens: Sequence[int]
    text: str | None = None
    line: int | None = None
    id: Any = None

    def name(self, number: int, file: Path | None) -> str:
        """The name in messages of the prompt of that number: its line of the file, and its "id" if it has one."""
        own_id = "" if self.id is None else f' ("id": {self.id!r})'
        return f"prompt {number}" if self.line is None else f"{file}, line {self.line}{own_id}:"


def plainly(model: ModelFolder) -> ModelFolder:
    """The model with a tokenizer that puts no special tokens around a text."""
    return model.without_special_tokens()


def open_to_cut(folder: Path, pp: int, **opened: Any) -> ModelFolder:
    """Open a saved model that is to be cut into `pp` stages; `opened` are further arguments of `open_model`.

    Raises: ValueError as `open_model` does, and for more stages than the model has units.
    """
    model = open_model(folder, **opened)
    if pp > model.num_units:
        raise ValueError(
            f"--pp {pp} asks for {pp} stages, but {model.folder} has {model.num_units} units "
            f"to cut from, so at most {model.num_units} are possible"
        )
    return model


def show_layers(model: ModelFolder) -> None:
    """Say on standard error where transformers' own layers run the model, and why."""
    if model.transformers_because is not None:
        print(f"penstock: transformers' own layers run {model.folder}: {model.transformers_because}", file=sys.stderr)


def show_lacking(model: ModelFolder, told: Container[str] = ()) -> None:
    """Say on standard error which of the model's own settings of generation have no effect here; `told`: what is given.

    A number of new tokens that is given makes max_length mean nothing.
    """
    fields = {name: own for name, own in model.lacking.items() if name != "max_length" or "max_new_tokens" not in told}
    if fields:
        named = ", ".join(f"{name} = {json.dumps(own)[:_MOST_SHOWN]}" for name, own in fields.items())
        where = (model.tokenizer_folder or model.folder) / GENERATION_CONFIG
        print(f"penstock: {where} has {named}, which Penstock lacks; answers are made without", file=sys.stderr)


def read_texts(path: Path, model: ModelFolder, text_field: str = "text") -> list[Text]:
    """Read all lines of a file to score.

    Raises: ValueError naming the line that the model cannot score, and why.
    """
    lines = _lines(path, "score", _TEXT_FORMS)
    # Loaded where a line has messages: transformers takes seconds.
    reader = cache(lambda: ExampleReader.load(str(model.tokenizer_folder), None))
    texts = [_text(f"{path}, line {number}", number, line, model, text_field, reader) for number, line in lines]
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


def read_prompts(path: Path, model: ModelFolder) -> list[Prompt]:
    """Read all lines of a file of prompts.

    Raises: ValueError naming the line that is not a prompt, and why.
    """
    lines = _lines(path, "continue", _PROMPT_FORMS)
    return [_prompt(f"{path}, line {number}", number, line, model) for number, line in lines]


def prompts_of_texts(texts: Sequence[str], model: ModelFolder) -> list[Prompt]:
    """Make prompts of texts.

    Raises: ValueError where the model has no tokenizer.
    """
    return [Prompt(_prompt_tokens(f"prompt {number}", text, model), text) for number, text in enumerate(texts)]


def tokens_of_word(word: str, model: ModelFolder) -> list[tuple[int, ...]]:
    """The token ids of a text as it begins one, and as it follows a blank, since their tokens often differ.

    Raises: ValueError for no text, or where the model has no tokenizer.
    """
    if not word:
        raise ValueError("--bad-word '' is empty; give a text")
    if model.tokenizer is None:
        raise ValueError(f"--bad-word {word!r} is a text, but {_lack(model)}")
    return [tuple(_encoded(f"--bad-word {word!r}", text, model, special_tokens=False)) for text in (word, f" {word}")]


def _lines(path: Path, purpose: str, forms: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers.

    Raises: ValueError for a file that cannot be read or has no such line.
    """
    lines, num_bytes = [], 0
    try:
        for number, line in enumerate(lines_of(path), 1):
            if line.strip():
                lines.append((number, line.decode()))
            num_bytes += len(line)
    except UnicodeDecodeError as error:
        where = num_bytes + error.start
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {where}); give JSON lines") from None
    except OSError as error:
        raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if not lines:
        raise ValueError(f"{path} has no line to {purpose}; a line is {forms}")
    return lines


def _parsed(where: str, line: str, forms: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON ({getattr(error, 'msg', error)}); a line is {forms}") from None


def _text(
    where: str, number: int, line: str, model: ModelFolder, text_field: str, reader: Callable[[], ExampleReader]
) -> Text:
    value = _parsed(where, line, _TEXT_FORMS)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: is a JSON {type(value).__name__}; a line is {_TEXT_FORMS}")
    if "prompt" in value and "completion" in value:
        prompt, completion = (_text_tokens(where, name, value[name], model) for name in ("prompt", "completion"))
        if not completion:
            raise ValueError(f"{where}: its completion is empty; nothing would be scored")
        return Text(number, value.get("id"), [*prompt, *completion], len(prompt))
    for name in ("tokens", text_field):
        if name in value:
            return Text(number, value.get("id"), _text_tokens(where, name, value[name], model))
    if "messages" in value and model.rates is not None:
        if model.tokenizer is None or model.tokenizer_folder is None:
            raise ValueError(f"{where}: holds messages, but {_lack(model)} with a chat template; give token ids")
        # As a reward model learns from them: without further special tokens.
        chat = Chat(reader(), where, template_options(where, value))
        return Text(number, value.get("id"), chat.tokenise(chat.render(messages_of(where, "messages", value))))
    raise ValueError(f"{where}: has only {', '.join(map(repr, value)) or 'an empty object'}; a line is {_TEXT_FORMS}")


def _prompt(where: str, number: int, line: str, model: ModelFolder) -> Prompt:
    value = _parsed(where, line, _PROMPT_FORMS)
    given = value if isinstance(value, dict) else {}
    text, tokens = given.get("prompt"), given.get("tokens")
    if isinstance(text, str):
        return Prompt(_prompt_tokens(where, text, model), text, number, given.get("id"))
    if _are_ids(tokens):
        return Prompt(tokens, None, number, given.get("id"))
    raise ValueError(f"{where}: holds no prompt; a line is {_PROMPT_FORMS}, a text or a list of token ids")


def _text_tokens(where: str, name: str, value: Any, model: ModelFolder) -> Sequence[int]:
    """The token ids of a text, with special tokens unless it continues another, or the ids as given."""
    if isinstance(value, str) and name != "tokens":
        if model.tokenizer is None:
            raise ValueError(f"{where}: {name!r} is a text, but {_lack(model)}; give token ids")
        return _encoded(f"{where}: {name!r}", value, model, special_tokens=name != "completion")
    if _are_ids(value):
        return value
    wanted = "a list of token ids" if name == "tokens" else "a text or a list of token ids"
    raise ValueError(f"{where}: {name!r} must be {wanted}")


def _prompt_tokens(where: str, text: str, model: ModelFolder) -> Sequence[int]:
    if model.tokenizer is None:
        raise ValueError(f"{where} is a text, but {_lack(model)}; give token ids in a --file")
    tokens = _encoded(where, text, model)
    if not tokens:
        raise ValueError(f"{where} is empty; a model continues what has at least one token")
    return tokens


def _lack(model: ModelFolder) -> str:
    """Why there is no tokenizer."""
    if (model.folder / "tokenizer.model").is_file():
        return (
            f"{model.folder} has a tokenizer.model and no tokenizer.json, which save_pretrained of transformers' "
            "AutoTokenizer writes"
        )
    return f"{model.folder} has no tokenizer"


def _encoded(where: str, text: str, model: ModelFolder, special_tokens: bool = True) -> list[int]:
    assert model.tokenizer is not None
    try:
        return model.tokenizer.encode([text], special_tokens)[0].tolist()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} cannot be written as UTF-8 ({error.reason})") from None


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int for token in value)
