"""Examples for supervised fine-tuning: conversations, prompts with completions, and texts; what is learned of them.

A conversation becomes text by the tokenizer's own chat template. Learned is what the assistant says, with the token
that ends it: the part between the template's marks ``{% generation %}``, or without such marks what follows the prompt
for an answer, up to the end of the message. Where a template writes an answer otherwise once others follow, each
answer is an example of its own. Of a prompt with a completion, the completion is learned; of a text, all.
Source: TRL 1.16, `SFTTrainer`, whose token ids and labels these are.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from penstock.data.chat_template import ChatTemplate, Rendering, TransformersTokenizer
from penstock.data.sources import CorpusError, EncodedDocument, Row, Source
from penstock.data.tokenizer import TokenizationError, ended
from penstock.io.files import parse_json

FORMS = '{"messages": [...]}, {"prompt": ..., "completion": ...} of texts or lists of messages, or {"text": ...}'
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MESSAGE = 'a message is an object with a "role" and a "content", which is a text or a list of parts'

Message = dict[str, Any]

Part = tuple[list[int], np.ndarray]
"""Token ids, and whether each is learned."""


@dataclass(frozen=True)
class ExampleReader:
    """Reads each row as an example.

    Texts and completions that are no messages end with `end`, if there is such a token.
    """

    #: the folder or file of the tokenizer
    name: str
    tokenizer: TransformersTokenizer
    #: the most tokens of an example; None for no limit
    max_tokens: int | None = None
    end: str | None = None
    special_tokens: bool = True
    marks_learned, documents_per_item = True, 1

    @classmethod
    def load(
        cls, name: str, max_tokens: int | None, end: str | None = None, special_tokens: bool = True, **own: Any
    ) -> Self:
        """Load a tokenizer with its chat template, if it has one; `end` replaces its own end token, "" with none.

        Raises: `CorpusError` if it is none of transformers, or lacks the end token.
        """
        if name == "bytes":
            raise CorpusError("examples need a model's tokenizer, not 'bytes'; give data.tokenizer or model.pretrained")
        path = Path(name).expanduser()
        folder = path if path.is_dir() else path.parent
        try:
            tokenizer = TransformersTokenizer.load(folder)
        except (OSError, ValueError) as error:
            raise CorpusError(f"transformers finds no tokenizer in {str(folder)!r}: {error}") from None
        if end and not tokenizer.has(end):
            raise CorpusError(f"the tokenizer {name!r} has no token {end!r} to end examples with")
        return cls(name, tokenizer, max_tokens, tokenizer.end if end is None else end, special_tokens, **own)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any example would be read differently."""
        parts = [self.tokenizer.fingerprint, self.max_tokens, self.end, self.special_tokens]
        return f"examples-{hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()}"

    def read(self, source: Source) -> Iterator[list[EncodedDocument]]:
        """Yield the source's examples.

        Raises: `CorpusError` naming file and line of one that cannot be learned from, and what would be possible.
        """
        for row in source.rows():
            yield self.encode(row, source.text_field)

    def encode(self, row: Row, text_field: str = "text") -> list[EncodedDocument]:
        """Tokenise an example, or each answer of a conversation where that must be read apart. Raises: as `read`."""
        where, example = row.where, row.value if isinstance(row.value, dict) else {}
        prompt, completion, text = (example.get(name) for name in ("prompt", "completion", text_field))
        if isinstance(prompt, str) and isinstance(completion, str) and completion:
            before = self.tokenise(where, prompt)
            tokens = self.tokenise(where, prompt + ended(completion, self.end))
            parts = [(tokens, np.arange(len(tokens)) >= _common(before, tokens))]
        elif isinstance(prompt, list) and isinstance(completion, list):
            first, second = (messages_of(where, name, example) for name in ("prompt", "completion"))
            parts = self._conversation(where, example, [*first, *second], len(first))
        elif example.get("messages") is not None:
            parts = self._conversation(where, example, messages_of(where, "messages", example))
        elif isinstance(text, str):
            tokens = self.tokenise(where, ended(text, self.end))
            parts = [(tokens, np.ones(len(tokens), np.bool_))]
        else:
            raise CorpusError(f"{where}: is no example but {str(row.value)[:60]!r}; a line is {FORMS}")
        for tokens, learned in parts:
            self.check_length(where, tokens)
            if not learned[1:].any():
                # nothing comes before the first token, from which it could be predicted
                raise CorpusError(f"{where}: holds nothing to learn; an example has a token to learn after another")
        # All bear the row's name, so that validation holds back either all or none of them.
        return [EncodedDocument(row.name, np.array(tokens, np.uint32), learned) for tokens, learned in parts]

    def check_length(self, where: str, tokens: Sequence[int]) -> None:
        """Raise `CorpusError` if a text is longer than the model takes."""
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            raise CorpusError(
                f"{where}: has {len(tokens)} tokens, but the model takes at most {self.max_tokens}; "
                "shorten the example or leave it out"
            )

    def _conversation(
        self, where: str, example: Mapping[str, Any], messages: list[Message], num_prompt: int = 0
    ) -> list[Part]:
        """Messages, of which the first `num_prompt` are not learned.

        Some templates write an answer otherwise once others follow, such as without what was thought before it. There
        each answer is learned as it was given: at the end of a conversation of its own.
        """
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n >= num_prompt]
        if not answers or not all(any(_besides_role(messages[number])) for number in answers):
            raise CorpusError(
                f'{where}: the assistant says nothing; give it messages of the role "assistant" to learn, none empty'
            )
        chat = Chat(self, where, template_options(where, example))
        if _MARKS.search(chat.template) is not None:
            tokens, learned = chat.marked(messages)
            if num_prompt:
                before = chat.tokenise(chat.render(messages[:num_prompt], answer_follows=True))
                learned &= np.arange(len(tokens)) >= _common(before, tokens)
            return [(tokens, learned)]
        if (whole := chat.with_answers(messages, answers)) is not None:
            return [whole]
        alone = (chat.with_answers(messages[: number + 1], [number]) for number in answers)
        return [part for part in alone if part is not None]

    def tokenise(self, where: str, text: str) -> list[int]:
        """The token ids of a text. Raises: as `encoding_of`."""
        return encoding_of(where, self.tokenizer, text, self.special_tokens)[0]


@dataclass(frozen=True)
class Chat:
    """The rendering of one conversation. Methods raise `CorpusError`."""

    reader: ExampleReader
    where: str
    #: the template's further arguments
    options: Mapping[str, Any]

    @property
    def template(self) -> str:
        template = self.reader.tokenizer.template(self.options.get("tools"))
        if template is None:
            raise CorpusError(
                f"{self.where}: holds messages, but the tokenizer {self.reader.name!r} has no chat template; put a "
                "chat_template.jinja into its folder, or give texts in place of messages"
            )
        return template

    def render(self, messages: Sequence[Message], answer_follows: bool = False) -> str:
        """The text of these messages, with the beginning of an answer if one follows."""
        return self._rendered(messages, add_generation_prompt=answer_follows)[0]

    def marked(self, messages: Sequence[Message]) -> tuple[list[int], np.ndarray]:
        """The tokens of these messages, and whether each is within the template's marks."""
        text, spans = self._rendered(messages, return_assistant_tokens_mask=True)
        tokens, borders = encoding_of(self.where, self.reader.tokenizer, text, False, spans)
        learned = np.zeros(len(tokens), np.bool_)
        for first, last in borders:
            if first is not None:
                learned[first : len(learned) if last is None else last + 1] = True
        return tokens, learned

    def tokenise(self, text: str) -> list[int]:
        return encoding_of(self.where, self.reader.tokenizer, text, False)[0]

    def with_answers(self, messages: Sequence[Message], answers: Sequence[int]) -> Part | None:
        """The tokens of these messages, with those of the answers of these numbers learned.

        An answer follows the prompt for it, up to the message's end; None where the template writes it otherwise once
        others follow. Raises: `CorpusError` if it comes first.
        """
        text = self.render(messages)
        tokens = self.tokenise(text)
        learned = np.zeros(len(tokens), np.bool_)
        for number in answers:
            if number == 0:
                raise CorpusError(
                    f"{self.where}: begins with the assistant, whose part the chat template of {self.reader.name!r} "
                    "does not mark; begin with another message, or mark it with {% generation %}"
                )
            until = self.render(messages[: number + 1])
            if not text.startswith(until):
                return None
            before = self.tokenise(self.render(messages[:number], answer_follows=True))
            learned[_common(before, tokens) : _common(self.tokenise(until), tokens)] = True
        return tokens, learned

    def _rendered(self, messages: Sequence[Message], **arguments: Any) -> Rendering:
        template = ChatTemplate(self.template, self.reader.tokenizer.special_tokens)
        try:
            return template.rendered(messages, self.options, **arguments)
        except TokenizationError as error:
            raise CorpusError(
                f"{self.where}: the chat template of {self.reader.name!r} refuses its messages ({error}); "
                "change them or the template"
            ) from None


def encoding_of(
    where: str, tokenizer: TransformersTokenizer, text: str, special_tokens: bool, spans: Sequence[tuple[int, int]] = ()
) -> tuple[list[int], list[tuple[int | None, int | None]]]:
    """The tokens of a text, and the first and last of each span; see `TransformersTokenizer.encode`.

    Raises: `CorpusError` if it cannot be written as UTF-8, or the tokenizer fails on it.
    """
    try:
        text.encode()
        return tokenizer.encode(text, special_tokens, spans)
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where}: cannot be written as UTF-8 ({error.reason}); give whole characters") from None
    except TokenizationError as error:
        raise CorpusError(f"{where}: the tokenizer {str(tokenizer.folder)!r} fails ({error})") from None


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (own, other) in pairs if own != other), min(len(first), len(second)))


def messages_of(where: str, name: str, example: Mapping[str, Any]) -> list[Message]:
    """The messages in a field. Raises: `CorpusError` if it holds none."""
    messages = example[name]
    if not isinstance(messages, list) or not messages:
        raise CorpusError(f"{where}: its {name!r} must be a list of one message or more; {_MESSAGE}")
    for number, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | list | None)
            # Calls of tools and what was thought stand beside a content that is null.
            and (message["role"] == "assistant" or any(value is not None for value in _besides_role(message)))
        ):
            raise CorpusError(f"{where}: message {number} of its {name!r} is {str(message)[:60]!r}; {_MESSAGE}")
    return messages


def _besides_role(message: Message) -> list[Any]:
    return [value for key, value in message.items() if key != "role"]


def template_options(where: str, example: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an example gives to the template beside its messages. Raises: `CorpusError`."""
    options, tools = example.get("chat_template_kwargs") or {}, example.get("tools")
    if not isinstance(options, dict):
        raise CorpusError(f"{where}: its 'chat_template_kwargs' must be an object")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError:
            raise CorpusError(f"{where}: its 'tools' are no JSON; give a list of objects") from None
    return {**options, "tools": tools} if tools else dict(options)


# ---- Pairs of texts, of which one is better: the examples that a reward model learns from


PAIR = '{"chosen": ..., "rejected": ...} with or without a "prompt", all texts or all lists of messages'


@dataclass(frozen=True)
class PairReader(ExampleReader):
    """Reads each row as two documents, the better text first; both begin with the row's prompt, if it has one.

    Learned of each is the token that is rated. Texts that are no messages end with `end`.
    """

    #: the token that pads texts and is not rated
    pad_token: int | None = None
    documents_per_item = 2

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any pair would be read differently."""
        text = f"{super().fingerprint} {self.pad_token}"
        return f"pairs-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def encode(self, row: Row, text_field: str = "text") -> list[EncodedDocument]:
        """Tokenise a pair. Raises: as `read`."""
        where, pair = row.where, row.value if isinstance(row.value, dict) else {}
        prompt = () if pair.get("prompt") is None else (pair["prompt"],)
        parts = [*prompt, pair.get("chosen"), pair.get("rejected")]
        if not any(all(isinstance(part, kind) for part in parts) for kind in (str, list)):
            raise CorpusError(
                f"{where}: is no pair, from which a reward model learns, but {str(row.value)[:60]!r}; a line is {PAIR}"
            )
        if pair.get("margin") is not None:
            raise CorpusError(
                f"{where}: has a 'margin', which the loss of penstock train does not know; leave it out, or begin with "
                "examples/reward_model.py, whose loss does"
            )
        documents = []
        for name in ("chosen", "rejected"):
            tokens = self._tokens(where, pair, name)
            self.check_length(where, tokens)
            learned = np.zeros(len(tokens), np.bool_)
            learned[rated_place(tokens, self.pad_token)] = True
            # Both bear the row's name, so that validation holds back either both or none of them.
            documents.append(EncodedDocument(row.name, np.array(tokens, np.uint32), learned))
        return documents

    def _tokens(self, where: str, pair: Mapping[str, Any], name: str) -> list[int]:
        prompt, answer = pair.get("prompt"), pair[name]
        if isinstance(answer, str):
            if not answer:
                raise CorpusError(f"{where}: its {name!r} is empty; give at least one character")
            return self.tokenise(where, (prompt or "") + ended(answer, self.end))
        messages = [*(messages_of(where, "prompt", pair) if prompt else []), *messages_of(where, name, pair)]
        if not any(_besides_role(messages[-1])):
            raise CorpusError(f"{where}: the last message of its {name!r} is empty; give at least one character")
        chat = Chat(self, where, template_options(where, pair))
        return chat.tokenise(chat.render(messages))


def rated_place(tokens: Sequence[int], pad_token: int | None) -> int:
    """The place of the token by which transformers' classifiers rate a text: the last that is no padding."""
    return next((place for place in reversed(range(len(tokens))) if tokens[place] != pad_token), 0)
