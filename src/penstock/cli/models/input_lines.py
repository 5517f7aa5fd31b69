"""Texts to score or to continue, from the command line or from lines of JSON, each of one of a few forms."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.examples import ExampleReader
    from penstock.engine.folders.model_folder import ModelFolder

TOKENS, MESSAGES = ("tokens",), ("messages",)
PROMPT_FORMS = (("prompt",), MESSAGES, TOKENS)
"""The forms of a line to continue, each by the fields that it has."""

_SHOWN = {"tokens": "[...]", "messages": "[...]"}


@dataclass(frozen=True)
class Text:
    """A text to score or to continue: its token ids, of which some may be a prompt, and the text if it was given so.

    Of a file it has its line, counted from 1, and its "id" if it has one.
    """

    tokens: Sequence[int]
    text: str | None = None
    line: int | None = None
    id: Any = None
    num_prompt_tokens: int = 0

    @property
    def first_scored(self) -> int:
        """The place of the first token that follows another token and is not part of the prompt."""
        return max(self.num_prompt_tokens, 1)

    def name(self, number: int, file: Path | None) -> str:
        """The name in messages of the text of that number: its line of the file, and its "id" if it has one."""
        shown_id = "" if self.id is None else f' ("id": {self.id!r})'
        return f"prompt {number}" if self.line is None else f"{file}, line {self.line}{shown_id}:"


@dataclass(frozen=True)
class InputReader:
    """Makes token ids of what is given to a model."""

    model: "ModelFolder"

    def prompts(self, path: Path) -> list[Text]:
        """Read the prompts of a file. Raises: ValueError naming the line that is none, and why."""
        return list(self._lines(path, "continue", PROMPT_FORMS))

    def texts(self, path: Path, text_field: str = "text") -> list[Text]:
        """Read the texts of a file to score. Raises: ValueError naming the line that cannot be scored, and why."""
        model = self.model
        # A reward model learns from messages.
        rated = () if model.rates is None else (MESSAGES,)
        forms = (TOKENS, (text_field,), ("prompt", "completion"), *rated)
        texts = list(self._lines(path, "score", forms))
        for text in texts:
            where = f"{path}, line {text.line}"
            if len(text.tokens) > (most := model.config.max_length):
                raise ValueError(f"{where}: has {len(text.tokens)} tokens, but {model.folder} takes at most {most}")
            outside = next((token for token in text.tokens if not 0 <= token < model.vocab_size), None)
            if outside is not None:
                raise ValueError(
                    f"{where}: token {outside} is outside the vocabulary of {model.folder}, 0 to {model.vocab_size - 1}"
                )
        return texts

    def prompts_of(self, texts: Sequence[str]) -> list[Text]:
        """Make prompts of texts. Raises: ValueError where the model has no tokenizer."""
        return [Text(self._tokens(f"prompt {number}", text), text) for number, text in enumerate(texts)]

    def tokens_of_word(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a text as it begins one, and as it follows a blank, since their tokens often differ.

        Raises: ValueError for no text, or where the model has no tokenizer.
        """
        if not word:
            raise ValueError("--bad-word '' is empty; give a text")
        return [tuple(self._tokens(f"--bad-word {word!r}", text, special=False)) for text in (word, f" {word}")]

    def _lines(self, path: Path, purpose: str, forms: Sequence[tuple[str, ...]]) -> Iterator[Text]:
        """The texts of the lines that are not blank.

        Raises: ValueError for a file that cannot be read, has no such line, or one that is of none of these forms.
        """
        from penstock.data.sources import json_lines

        fields = [", ".join(f"{json.dumps(name)}: {_SHOWN.get(name, '...')}" for name in form) for form in forms]
        *others, last = [f"{{{each}}}" for each in fields]
        a_line = f"a line is {', '.join(others)} or {last}"
        lines = list(json_lines(path))
        if not lines:
            raise ValueError(f"{path} has no line to {purpose}; {a_line}")
        for number, values in lines:
            where = f"{path}, line {number}"
            if not isinstance(values, dict):
                raise ValueError(f"{where}: is a JSON {type(values).__name__}; {a_line}")
            # A line of several forms: what of it was meant?
            fitting = [form for form in forms if all(values.get(name) is not None for name in form)]
            if len(fitting) > 1:
                present = " and ".join(repr(name) for form in fitting for name in form)
                raise ValueError(f"{where}: has {present}, of which one is expected; leave out the other")
            if not fitting:
                present = ", ".join(map(repr, values)) or "an empty object"
                raise ValueError(f"{where}: has only {present}; {a_line}")
            form = fitting[0]
            if form == MESSAGES:
                parts = [self._conversation(where, values, answer_follows=purpose == "continue")]
            else:
                parts = [self._part(where, name, values[name]) for name in form]
            if not parts[-1]:
                raise ValueError(f"{where}: {form[-1]!r} has no token; give at least one")
            text = values[form[0]] if len(form) == 1 and isinstance(values[form[0]], str) else None
            num_prompt_tokens = len(parts[0]) if len(parts) > 1 else 0
            yield Text([token for part in parts for token in part], text, number, values.get("id"), num_prompt_tokens)

    def _part(self, where: str, name: str, value: Any) -> Sequence[int]:
        """The token ids of a text, with special tokens unless it continues another, or the ids as given."""
        if isinstance(value, str) and name != "tokens":
            return self._tokens(f"{where}: {name!r}", value, special=name != "completion")
        if isinstance(value, list) and all(type(token) is int for token in value):
            return value
        wanted = "a list of token ids" if name == "tokens" else "a text or a list of token ids"
        raise ValueError(f"{where}: {name!r} must be {wanted}")

    def _conversation(self, where: str, values: Mapping[str, Any], answer_follows: bool) -> list[int]:
        """The token ids of a line's messages, written by the chat template, which puts all special tokens itself.

        answer_follows: they end where the assistant is to speak.
        """
        if self.model.tokenizer is None:
            raise ValueError(f"{where}: holds messages, but {self.model.folder} has no tokenizer; give token ids")
        from penstock.data.examples import Chat, messages_of, template_options

        messages = messages_of(where, "messages", values)
        if answer_follows and messages[-1]["role"] == "assistant":
            raise ValueError(f"{where}: ends with the assistant, so that no answer follows; leave its last message out")
        chat = Chat(self._examples, where, template_options(where, values))
        return chat.tokenise(chat.render(messages, answer_follows))

    @cached_property
    def _examples(self) -> "ExampleReader":
        # Loaded where a line has messages: transformers takes seconds.
        from penstock.data.examples import ExampleReader

        return ExampleReader.load(str(self.model.tokenizer_folder), None)

    def _tokens(self, where: str, text: str, special: bool = True) -> list[int]:
        if self.model.tokenizer is None:
            raise ValueError(
                f"{where} is a text, but {self.model.folder} has no tokenizer (tokenizer.json); give token ids"
            )
        try:
            return self.model.tokenizer.encode([text], special)[0].tolist()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} cannot be written as UTF-8 ({error.reason})") from None
