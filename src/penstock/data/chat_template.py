"""Chat templates, and the tokenizers of transformers that bring them.

A template is rendered as transformers does it, in Jinja's sandbox.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.data.tokenizer import TokenizationError, tokenization
from penstock.io.files import check_texts, read_text

Rendering = tuple[str, list[tuple[int, int]]]
"""A text, and where in it the template marks what the assistant says: first character, and one past the last."""


@dataclass(frozen=True)
class TransformersTokenizer:
    """Transformers' tokenizer in a folder, with its chat template, if it has one.

    vocab_size: one more than the largest id. end: the text of its end token. special_tokens: those that templates name.
    fingerprint: differs if any text or conversation would be tokenised differently.
    """

    folder: Path
    vocab_size: int
    end: str | None
    special_tokens: Mapping[str, Any]
    fingerprint: str
    #: that of transformers
    inner: Any = field(compare=False, repr=False)

    @classmethod
    def load(cls, folder: Path) -> TransformersTokenizer:
        """Find the one in a folder.

        Raises:
            ValueError: the reason why there is none.
        """
        check_texts(folder)
        with tokenization():
            from transformers import AutoTokenizer

            inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            if inner.is_fast:
                # A saved tokenizer may truncate or pad its input, but texts must stay complete.
                inner.backend_tokenizer.no_truncation()
                inner.backend_tokenizer.no_padding()
            content = inner.backend_tokenizer.to_str() if inner.is_fast else json.dumps(inner.get_vocab())
            special_tokens = {name: str(token) for name, token in inner.special_tokens_map.items()}
            text = json.dumps([content, inner.chat_template, special_tokens])
            fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            # The largest id decides, since added tokens may leave gaps.
            vocab_size = max(inner.get_vocab().values(), default=-1) + 1
            return cls(folder, vocab_size, inner.eos_token, inner.special_tokens_map, fingerprint, inner)

    def template(self, tools: Any = None) -> str | None:
        """Its chat template, or the one that it has for tools. Raises: TokenizationError."""
        with tokenization():
            return None if self.inner.chat_template is None else self.inner.get_chat_template(None, tools)

    def has(self, token: str) -> bool:
        """True for the text of a token."""
        return token in self.inner.get_vocab()

    def encode(
        self, text: str, special_tokens: bool, spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int | None, int | None]]]:
        """Token ids, and the first and the last token of each span of characters. Raises: TokenizationError."""
        with tokenization():
            encoded = self.inner(text, add_special_tokens=special_tokens, verbose=False)
            borders = [(encoded.char_to_token(start), encoded.char_to_token(end - 1)) for start, end in spans]
            return encoded["input_ids"], borders


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template in Jinja's language. special_tokens: those that it may name, as in transformers."""

    source: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path | None, file: Path | None = None) -> ChatTemplate | None:
        """The template of a tokenizer's folder, or that of `file` for it; None if there is none.

        folder: None for a tokenizer without files.

        Raises:
            ValueError: the folder's tokenizer or the file cannot be read.
        """
        try:
            source = None if file is None else read_text(file)
        except OSError as error:
            raise ValueError(f"the chat template {file} cannot be read ({error})") from None
        if folder is None:
            return None if source is None else cls(source)
        config = folder / "tokenizer_config.json"
        own = (folder / "chat_template.jinja").is_file()
        own = own or (config.is_file() and "chat_template" in read_text(config))
        if source is None and not own:
            return None  # so that transformers' tokenizers need not be imported
        try:
            tokenizer = TransformersTokenizer.load(folder)
            source = source or tokenizer.template()
        except ValueError as error:
            raise ValueError(f"the chat template in {folder} cannot be read ({error})") from None
        return None if source is None else cls(source, tokenizer.special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The text of these messages, up to where the answer begins.

        Raises:
            TokenizationError: the template refuses them.
        """
        try:
            return self.rendered(messages, options, add_generation_prompt=True)[0]
        except TokenizationError as error:
            raise TokenizationError(f"the model's chat template refuses the messages ({error})") from None

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Rendering:
        """The text of these messages, and where in it the assistant speaks, if the template marks that.

        options: the template's own arguments. arguments: further ones of transformers' `render_jinja_template`.

        Raises:
            TokenizationError: the reason why there is no text.
        """
        options = options or {}
        if ours := sorted({"messages", "chat_template", *arguments} & options.keys()):
            raise TokenizationError(f"{ours[0]!r} is no argument of its own")
        # As transformers: many templates fail at a field that is null, and none at one that is missing.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        with tokenization():
            from transformers.utils.chat_template_utils import render_jinja_template

            values: dict[str, Any] = {**arguments, **self.special_tokens, **options}
            rendered: Any = render_jinja_template(conversations=[plain], chat_template=self.source, **values)
        [text], spans = rendered
        parts = (content for message in plain if isinstance(content := message.get("content"), list))
        if any(str(content) in text for content in parts if content):
            raise TokenizationError("it knows no content of parts; a text is possible")
        return text, [(start, end) for start, end in (spans[0] if spans else [])]
