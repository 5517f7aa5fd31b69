"""Chat templates: the text of a conversation as a model has learned it, with the beginning of the answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.io.files import check_texts, read_text

# ---- Rendering of chat templates in a process of its own, which can be ended: a template may loop without end


MOST_S = 5
"""Seconds of a processor that one rendering may take, at most."""

_PROGRAM = Path(__file__).with_name("rendering_process.py")


class RenderingError(ValueError):
    """A template that refuses what it is given, or takes too much time or memory; the message is a reason."""


class Rendered(NamedTuple):
    """A text, and where in it the template marks what the assistant says: first character, and one past the last."""

    text: str
    spans: list[tuple[int, int]]


class TemplateRenderer:
    """Renders chat templates, one at a time, as transformers does; threads may share it.

    Args:
        most_s: seconds of a processor for each.
    """

    #: as given
    _most_s: int
    #: the process that renders, and the one that started it; None before the first
    _process: subprocess.Popen[bytes] | None
    _owner: int
    #: held while the process renders
    _lock: threading.Lock

    def __init__(self, most_s: int = MOST_S) -> None:
        self._most_s, self._process, self._owner, self._lock = most_s, None, 0, threading.Lock()

    def start(self) -> None:
        """Start the process before it is needed; it takes a moment."""
        with self._lock:
            self._started()

    def render(self, template: str, **arguments: Any) -> Rendered:
        """Render one conversation.

        arguments: those of transformers' `render_jinja_template`, as values of JSON, and the template's own.

        Raises:
            RenderingError: why there is no text.
        """
        asked = json.dumps({"chat_template": template, **arguments}, default=str)
        with self._lock:
            process = self._started()
            try:
                answer = _exchange(process, asked.encode() + b"\n")
            except BaseException:
                # Its answer may still come, and would then be taken for that of the next.
                _end(process, self._owner)
                raise
            if not answer:
                # It has ended, and so closed its output.
                process.wait()
                _end(process, self._owner)
                if process.returncode == -signal.SIGXCPU:
                    raise RenderingError(f"it computes for more than {self._most_s} s")
                raise RenderingError(f"the process that renders it has ended with code {process.returncode}")
        content = json.loads(answer)
        if "error" in content:
            raise RenderingError(content["error"])
        return Rendered(content["text"], [(start, end) for start, end in content["spans"]])

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            command = [sys.executable, "-P", str(_PROGRAM), str(self._most_s)]
            # In a session of its own, since Ctrl-C ends what is being rendered for in its own way.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._process, self._owner = process, os.getpid()
            weakref.finalize(self, _end, process, self._owner)
        return process


def _exchange(process: subprocess.Popen[bytes], asked: bytes) -> bytes:
    """The answer to one line; empty where the process has ended instead."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(asked)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, unless it is that of another one which forked this one."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


# ---- Chat templates: the text of a conversation as a model has learned it, with the beginning of the answer


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
