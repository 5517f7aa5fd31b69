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
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_S = 5
"""Seconds of a processor that a piece of work may take, at most, beside those for a long text."""

# For each byte of what it is given. Slow tokenizers read 50,000 in a second, and take 270 bytes of memory for each.
_MORE_S, _MORE_MEMORY_BYTES = 2e-5, 1024
_MOST_MEMORY_BYTES = 1 << 30
_MOST_CHARACTERS = 64 << 20
# Byte by byte, none makes more of a long text than this for each of its bytes.
_MOST_TOKENS, _MORE_TOKENS = 1 << 20, 4


class GuardError(ValueError):
    """The work refuses what it is given, or takes too much time or memory; the message is a reason."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer's file, or the folder of one of transformers', as it was when it was found."""

    path: str
    #: of its files: name, bytes, and when it was written, in nanoseconds
    stamp: Sequence[tuple[str, int, int]]

    @classmethod
    def of(cls, path: Path) -> TokenizerFiles:
        """The place of a file or a folder."""
        files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _TEXTS)
        found = [(file.name, file.stat()) for file in files if file.is_file()]
        return cls(str(path), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found])

    @property
    def num_bytes(self) -> int:
        """The bytes that are read to open it."""
        return sum(size for _, size, _ in self.stamp)


_TEXTS = (".json", ".model", ".txt", ".jinja", ".tiktoken")
"""The endings of files that transformers' tokenizers read."""


@dataclass(eq=False)
class Guard:
    """Renders chat templates and tokenises in a process of its own; threads may share it.

    most_s: of a processor for a piece of work with little text.
    """

    most_s: int = MOST_S
    #: the process, and the one that started it; None before the first
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _owner: int = field(default=0, init=False)
    #: what the process has opened
    _opened: TokenizerFiles | None = field(default=None, init=False)
    #: held while the process works
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def do(self, work: str, arguments: Mapping[str, Any], place: TokenizerFiles | None = None) -> Any:
        """Do a piece of work, by its name in `_WORK`: arguments and result are values of JSON.

        place: of the tokenizer that does it, which is opened unless the last piece was done by it.

        Raises:
            GuardError: why there is no result.
        """
        opened = None if place is None else [place.path, place.stamp]
        asked = json.dumps([work, opened, arguments], default=str).encode() + b"\n"
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
                size = len(asked) + (0 if place in (None, self._opened) else place.num_bytes)
                raise GuardError(_why_ended(process.returncode, self.most_s, size))
            content = json.loads(answer)
            if content.get("broken"):
                _end(process, self._owner)
            elif place is not None and "error" not in content:
                self._opened = place
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
            self._process, self._owner, self._opened = process, os.getpid(), None
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


def _why_ended(code: int, most_s: int, num_bytes: int) -> str:
    if code == -signal.SIGXCPU:
        return f"it computes for more than {_seconds(most_s, num_bytes)} s"
    if code < 0:
        most_gib = _memory_bytes(num_bytes) / (1 << 30)
        return f"it takes more than {most_gib:.3g} GiB of memory, or fails in itself ({signal.Signals(-code).name})"
    return f"its process has ended with code {code}"


def _seconds(most_s: int, num_bytes: int) -> int:
    """Seconds of a processor for so many bytes."""
    return most_s + int(_MORE_S * num_bytes)


def _memory_bytes(num_bytes: int) -> int:
    """Memory for so many bytes, beside the libraries'."""
    return _MOST_MEMORY_BYTES + _MORE_MEMORY_BYTES * num_bytes


# ---- In the process: a line of JSON in, a line of JSON out, until the input ends


def _serve(most_s: int) -> None:
    opened: Any = None
    tokenizer: Any = None
    own_bytes, most_bytes = _data_bytes(), 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        try:
            work, wanted, arguments = json.loads(line)
            # Imported without limits: libraries are no part of what a folder brings.
            for limit in (resource.RLIMIT_CPU, resource.RLIMIT_DATA):
                resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            before = _data_bytes()
            _import(work, wanted)
            own_bytes += _data_bytes() - before
            size = len(line) + (0 if wanted in (None, opened) else sum(bytes for _, bytes, _ in wanted[1]))
            # What a long text has taken is not all given back.
            most_bytes = max(most_bytes, size)
            cpu_s = math.ceil(time.process_time()) + _seconds(most_s, size)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
            memory_bytes = own_bytes + _memory_bytes(most_bytes)
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.RLIM_INFINITY))
            if wanted not in (None, opened):
                opened = tokenizer = None
                tokenizer, opened = _open(wanted[0]), wanted
            answer = json.dumps({"result": _WORK[work](tokenizer, **arguments)})
        except BaseException as error:  # others' programs may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            # A panic of Rust is no Exception, and may leave locks held.
            answer = json.dumps({"error": reason, "broken": not isinstance(error, Exception)})
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def _data_bytes() -> int:
    """The memory that RLIMIT_DATA counts; addresses that threads reserve, for each of a host's cores, are not in it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _import(work: str, wanted: Any) -> None:
    # Transformers imports torch where it can, for seconds; neither templates nor tokenizers compute with it.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    if work == "render":
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401
    elif os.path.isdir(wanted[0]):
        from transformers import AutoTokenizer  # noqa: F401
    else:
        import tokenizers  # noqa: F401


def _open(path: str) -> Any:
    """The tokenizer of a file, or transformers' of a folder.

    A saved tokenizer may truncate or pad its input, but texts must stay complete.
    """
    if os.path.isdir(path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        inner = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    else:
        import tokenizers

        with open(path, encoding="utf-8") as file:
            tokenizer = inner = tokenizers.Tokenizer.from_str(file.read())
    if inner is not None:
        inner.no_truncation()
        inner.no_padding()
    return tokenizer


def _render(_: Any, messages: list[Any], **arguments: Any) -> Any:
    """Render as transformers does it, in Jinja's sandbox: the text, and the spans that the template marks in it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], spans = render_jinja_template(conversations=[messages], **arguments)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it writes more than {_MOST_CHARACTERS} characters")
    return text, spans[0] if spans else []


def _size(tokenizer: Any) -> int:
    """One more than the largest id: added tokens may leave gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _describe(tokenizer: Any) -> Any:
    """The facts about one of transformers."""
    import hashlib

    content = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    text = json.dumps([content, tokenizer.chat_template, special_tokens])
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return [_size(tokenizer), tokenizer.eos_token, tokenizer.special_tokens_map, fingerprint]


def _template(tokenizer: Any, tools: Any) -> str | None:
    return None if tokenizer.chat_template is None else tokenizer.get_chat_template(None, tools)


def _encode(tokenizer: Any, texts: list[str], special_tokens: bool) -> list[str]:
    encodings = tokenizer.encode_batch(texts, add_special_tokens=special_tokens)
    return [_packed(encoding.ids, text) for encoding, text in zip(encodings, texts, strict=True)]


def _encode_marked(tokenizer: Any, text: str, special_tokens: bool, spans: list[list[int]]) -> Any:
    """Token ids by transformers, and the first and the last token of each span of characters."""
    encoded = tokenizer(text, add_special_tokens=special_tokens)
    borders = [[encoded.char_to_token(start), encoded.char_to_token(end - 1)] for start, end in spans]
    return _packed(encoded["input_ids"], text), borders


def _packed(ids: list[int], text: str) -> str:
    """Token ids as `unpacked` reads them."""
    if len(ids) > _MOST_TOKENS + _MORE_TOKENS * len(text):
        raise ValueError(f"it makes {len(ids)} tokens of {len(text)} characters")
    return b64encode(array("I", ids)).decode()


def _decode(tokenizer: Any, several: list[list[int]]) -> list[str]:
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in several]
    if sum(map(len, texts)) > _MOST_CHARACTERS:
        raise ValueError(f"it writes more than {_MOST_CHARACTERS} characters")
    return texts


_WORK: Mapping[str, Callable[..., Any]] = {
    "render": _render,
    "describe": _describe,
    "template": _template,
    "encode_marked": _encode_marked,
    "size": _size,
    "longest": lambda tokenizer: max((len(text.encode()) for text in tokenizer.get_vocab()), default=1),
    "encode": _encode,
    "decode": _decode,
    "entry": lambda tokenizer, token: tokenizer.id_to_token(token),
    "id": lambda tokenizer, text: tokenizer.token_to_id(text),
    "has": lambda tokenizer, text: text in tokenizer.get_vocab(),
}


def unpacked(ids: str) -> array[int]:
    """The token ids of a text, as `encode` gives them."""
    return array("I", b64decode(ids))


# ---- Tokenizers of transformers


@dataclass(frozen=True)
class TransformersTokenizer:
    """Transformers' tokenizer in a folder, with its chat template, if it has one.

    vocab_size: one more than the largest id. end: the text of its end token. special_tokens: those that templates name.
    fingerprint: differs if any text or conversation would be tokenised differently.
    """

    place: TokenizerFiles
    guard: Guard = field(compare=False)
    vocab_size: int
    end: str | None
    special_tokens: Mapping[str, Any]
    fingerprint: str

    @classmethod
    def load(cls, folder: Path) -> TransformersTokenizer:
        """Find the one in a folder.

        Raises:
            ValueError: the reason why there is none.
        """
        from penstock.io.files import check_texts

        check_texts(folder)
        place, guard = TokenizerFiles.of(folder), Guard()
        return cls(place, guard, *guard.do("describe", {}, place))

    def template(self, tools: Any = None) -> str | None:
        """Its chat template, or the one that it has for tools. Raises: GuardError."""
        return self.guard.do("template", {"tools": tools}, self.place)

    def has(self, token: str) -> bool:
        """True for the text of a token."""
        return self.guard.do("has", {"text": token}, self.place)

    def encode(
        self, text: str, special_tokens: bool, spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int | None, int | None]]]:
        """Token ids, and the first and the last token of each span of characters. Raises: GuardError."""
        given = {"text": text, "special_tokens": special_tokens, "spans": spans}
        ids, borders = self.guard.do("encode_marked", given, self.place)
        return unpacked(ids).tolist(), [(first, last) for first, last in borders]


# ---- Chat templates: the text of a conversation as a model has learned it, with the beginning of the answer


Rendering = tuple[str, list[tuple[int, int]]]
"""A text, and where in it the template marks what the assistant says: first character, and one past the last."""


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template in Jinja's language. special_tokens: those that it may name, as in transformers."""

    source: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
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
        return None if source is None else cls(source, tokenizer.special_tokens, tokenizer.guard)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """The text of these messages, up to where the answer begins.

        Raises:
            GuardError: the template refuses them.
        """
        try:
            return self.rendered(messages, options, add_generation_prompt=True)[0]
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
        given = {**self.special_tokens, **options}
        text, spans = self.guard.do("render", {"chat_template": self.source, "messages": plain, **arguments, **given})
        parts = (content for message in plain if isinstance(content := message.get("content"), list))
        if any(str(content) in text for content in parts if content):
            raise GuardError("it knows no content of parts; a text is possible")
        return text, [(start, end) for start, end in spans]


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
