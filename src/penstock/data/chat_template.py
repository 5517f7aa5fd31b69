"""Chat templates: the text of a conversation as a model has learned it, with the beginning of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.data.rendering import Rendered, RenderingError, TemplateRenderer
from penstock.settings.files import check_texts, read_text


class ChatTemplateError(ValueError):
    """A template that cannot be read, or that refuses a conversation."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template in Jinja's language, rendered by transformers in Jinja's sandbox, and that in a process of its own.

    tokenizer: transformers', which knows the special tokens that templates name.
    """

    source: str
    tokenizer: Any
    renderer: TemplateRenderer = field(default_factory=TemplateRenderer)

    @classmethod
    def load(cls, folder: Path | None, file: Path | None = None) -> ChatTemplate | None:
        """The template of a tokenizer's folder, or that of `file` for it; None if there is none.

        folder: None for a tokenizer without files.

        Raises:
            ChatTemplateError: the folder's tokenizer or the file cannot be read.
        """
        source = None
        if file is not None:
            try:
                source = read_text(file)
            except (OSError, UnicodeDecodeError) as error:
                raise ChatTemplateError(f"the chat template {file} cannot be read ({error})") from None
        if folder is None:
            return None if source is None else cls(source, _empty_tokenizer())
        has_own = (folder / "chat_template.jinja").is_file() or "chat_template" in _text(
            folder / "tokenizer_config.json"
        )
        if source is None and not has_own:
            return None  # so that transformers' tokenizers need not be imported
        try:
            tokenizer = tokenizer_of(folder)
            source = source or tokenizer.get_chat_template()
        except ValueError as error:
            raise ChatTemplateError(f"the chat template in {folder} cannot be read ({error})") from None
        found = cls(source, tokenizer)
        # It imports what it needs while the model is loaded.
        found.renderer.start()
        return found

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of these messages, up to where the answer begins.

        Raises:
            ChatTemplateError: the template refuses them.
        """
        try:
            return self.rendered(messages, add_generation_prompt=True).text
        except RenderingError as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages ({error})") from None

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Rendered:
        """The text of these messages, and where in it the assistant speaks, if the template marks that.

        options: the template's own arguments. arguments: further ones of transformers' `render_jinja_template`.

        Raises:
            RenderingError: the reason why there is no text.
        """
        options = options or {}
        if ours := sorted({"messages", "chat_template", *arguments} & options.keys()):
            raise RenderingError(f"{ours[0]!r} is no argument of its own")
        # As transformers: many templates fail at a field that is null, and none at one that is missing.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {**self.tokenizer.special_tokens_map, **options}
        rendered = self.renderer.render(self.source, messages=plain, **arguments, **given)
        parts = (content for message in plain if isinstance(content := message.get("content"), list))
        if any(str(content) in rendered.text for content in parts if content):
            raise RenderingError("it knows no content of parts; a text is possible")
        return rendered


def tokenizer_of(folder: Path) -> Any:
    """Transformers' tokenizer in a folder, with its chat template, if it has one.

    Raises:
        ValueError: the reason why there is none.
    """
    from transformers import AutoTokenizer

    try:
        check_texts(folder)
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, by what is wrong with the files
        raise ValueError((str(error).strip().splitlines() or [type(error).__name__])[0]) from None


def _empty_tokenizer() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))


def _text(path: Path) -> str:
    return read_text(path) if path.is_file() else ""
