"""The guard of what a model's folder brings: a chat template or a tokenizer is a program, and may never end.

Such work is done in a process of its own, a piece at a time, within limits of the system on time and memory. The
process runs this very file, whose head imports nothing of Penstock, so that it starts quickly and holds little.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_S = 5
"""Seconds of a processor that a piece of work may take, at most."""

_MOST_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 64 << 20


class GuardError(ValueError):
    """The work refuses what it is given, or takes too much time or memory; the message is a reason."""


@dataclass(eq=False)
class Guard:
    """Renders chat templates in a process of its own; threads may share it. most_s: of a processor for each text."""

    most_s: int = MOST_S
    #: the process, and the one that started it; None before the first
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _owner: int = field(default=0, init=False)
    #: held while the process works
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def start(self) -> None:
        """Start the process before it is needed; it takes a moment."""
        with self._lock:
            self._started()

    def do(self, arguments: Mapping[str, Any]) -> Any:
        """Do a piece of work: arguments and result are values of JSON.

        Raises:
            GuardError: why there is no result.
        """
        asked = json.dumps(arguments, default=str).encode() + b"\n"
        with self._lock:
            process, answer = self._started(), b""
            assert process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):  # it has ended instead
                    process.stdin.write(asked)
                    process.stdin.flush()
                    answer = process.stdout.readline()
            except BaseException:
                # Its answer may still come, and would then be taken for that of the next.
                _end(process, self._owner)
                raise
            if not answer:
                # It has ended, and so closed its output.
                process.wait()
                _end(process, self._owner)
                if process.returncode == -signal.SIGXCPU:
                    raise GuardError(f"it computes for more than {self.most_s} s")
                raise GuardError(f"its process has ended with code {process.returncode}")
        content = json.loads(answer)
        if "error" in content:
            raise GuardError(content["error"])
        return content["result"]

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            # In a session of its own, since Ctrl-C ends what the work is done for in its own way.
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self.most_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._process, self._owner = process, os.getpid()
            weakref.finalize(self, _end, process, self._owner)
        return process


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process, unless it is that of another one which forked this one."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


# ---- In the process: a line of JSON in, a line of JSON out, until the input ends


def _serve(most_s: int) -> None:
    """Render as transformers does it, in Jinja's sandbox: the text, and the spans that the template marks in it."""
    # Imported before the limits hold.
    from transformers.utils.chat_template_utils import render_jinja_template

    def work(messages: list[Any], **arguments: Any) -> Any:
        [text], spans = render_jinja_template(conversations=[messages], **arguments)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it writes more than {_MOST_CHARACTERS} characters")
        return text, spans[0] if spans else []

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin.buffer:
        limit = math.ceil(time.process_time()) + most_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            answer = json.dumps({"result": work(**json.loads(line))})
        except Exception as error:  # others' programs may raise anything
            answer = json.dumps({"error": (str(error).strip().splitlines() or [type(error).__name__])[0]})
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


# ---- Chat templates: the text of a conversation as a model has learned it, with the beginning of the answer


Rendering = tuple[str, list[tuple[int, int]]]
"""A text, and where in it the template marks what the assistant says: first character, and one past the last."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template in Jinja's language.

    tokenizer: transformers', which knows the special tokens that templates name.
    """

    source: str
    tokenizer: Any
    guard: Guard = field(default_factory=Guard)

    @classmethod
    def load(cls, folder: Path | None, file: Path | None = None) -> ChatTemplate | None:
        """The template of a tokenizer's folder, or that of `file` for it; None if there is none.

        folder: None for a tokenizer without files.

        Raises:
            ValueError: the folder's tokenizer or the file cannot be read.
        """
        from penstock.io.files import read_text

        source = None
        if file is not None:
            try:
                source = read_text(file)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"the chat template {file} cannot be read ({error})") from None
        if folder is None and source is not None:
            import tokenizers
            from transformers import PreTrainedTokenizerFast

            empty = tokenizers.Tokenizer(tokenizers.models.BPE())
            return cls(source, PreTrainedTokenizerFast(tokenizer_object=empty))
        if folder is None:
            return None
        config = folder / "tokenizer_config.json"
        own = (folder / "chat_template.jinja").is_file()
        own = own or (config.is_file() and "chat_template" in read_text(config))
        if source is None and not own:
            return None  # so that transformers' tokenizers need not be imported
        try:
            tokenizer = tokenizer_of(folder)
            found = cls(source or tokenizer.get_chat_template(), tokenizer)
        except ValueError as error:
            raise ValueError(f"the chat template in {folder} cannot be read ({error})") from None
        # It imports what it needs while the model is loaded.
        found.guard.start()
        return found

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of these messages, up to where the answer begins.

        Raises:
            GuardError: the template refuses them.
        """
        try:
            return self.rendered(messages, add_generation_prompt=True)[0]
        except GuardError as error:
            raise GuardError(f"the model's chat template refuses the messages ({error})") from None

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Rendering:
        """The text of these messages, and where in it the assistant speaks, if the template marks that.

        options: the template's own arguments. arguments: further ones of transformers' `render_jinja_template`.

        Raises:
            GuardError: the reason why there is no text.
        """
        options = options or {}
        if ours := sorted({"messages", "chat_template", *arguments} & options.keys()):
            raise GuardError(f"{ours[0]!r} is no argument of its own")
        # As transformers: many templates fail at a field that is null, and none at one that is missing.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {**self.tokenizer.special_tokens_map, **options}
        text, spans = self.guard.do({"chat_template": self.source, "messages": plain, **arguments, **given})
        parts = (content for message in plain if isinstance(content := message.get("content"), list))
        if any(str(content) in text for content in parts if content):
            raise GuardError("it knows no content of parts; a text is possible")
        return text, [(start, end) for start, end in spans]


# ---- Tokenizers


def tokenizer_of(folder: Path) -> Any:
    """Transformers' tokenizer in a folder, with its chat template, if it has one.

    Raises:
        ValueError: the reason why there is none.
    """
    from transformers import AutoTokenizer

    from penstock.io.files import check_texts

    try:
        check_texts(folder)
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, by what is wrong with the files
        raise ValueError((str(error).strip().splitlines() or [type(error).__name__])[0]) from None


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
