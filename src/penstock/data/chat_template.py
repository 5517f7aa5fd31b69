"""Chat templates: the text of a conversation as a model has learned it, with the beginning of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.data.rendering import RenderingError, TemplateRenderer
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
        from transformers import AutoTokenizer

        try:
            check_texts(folder)
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            source = source or tokenizer.get_chat_template()
        except Exception as error:  # of many kinds, by what is wrong with the files
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ChatTemplateError(f"the chat template in {folder} cannot be read ({reason})") from None
        found = cls(source, tokenizer)
        # It imports what it needs while the model is loaded.
        found.renderer.start()
        return found

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of these messages, up to where the answer begins.

        Raises:
            ChatTemplateError: the template refuses them.
        """
        arguments = {"messages": list(messages), "add_generation_prompt": True}
        try:
            return self.renderer.render(self.source, **self.tokenizer.special_tokens_map, **arguments).text
        except RenderingError as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages ({error})") from None


def _empty_tokenizer() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))


def _text(path: Path) -> str:
    return read_text(path) if path.is_file() else ""
