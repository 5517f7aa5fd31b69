"""Text to token ids: by bytes, or by any Hugging Face tokenizer file."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.sources import CorpusError
from penstock.io.files import read_bytes, read_json_object

END_ENTRY = "<|end|>"
"""How the vocabulary of `ByteTokenizer` writes its end token."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """A token per byte of UTF-8; optionally an end token (256) after every document."""

    end_token: bool = False

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 257 if self.end_token else 256

    @property
    def fingerprint(self) -> str:
        """A text that differs if any text would be tokenised differently."""
        return f"bytes-{self.vocab_size}"

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The token put after every text, if there is one."""
        return (256,) if self.end_token else ()

    def encode(self, texts: Sequence[str], special_tokens: bool = True) -> list[np.ndarray]:
        """The token ids of each text, an array per text.

        special_tokens: with those that the tokenizer itself puts around a text, such as one for its beginning.
        """
        dtype, end = (np.uint16, [256]) if self.end_token else (np.uint8, [])
        arrays = (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)
        return [np.append(array.astype(dtype), np.array(end, dtype)) if end else array for array in arrays]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens; special tokens have none, and invalid bytes become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def entry(self, token: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that it lacks."""
        if token < 256:
            return f"<0x{token:02X}>"
        return END_ENTRY if token in self.end_tokens else None

    def without_special_tokens(self) -> "ByteTokenizer":
        """This tokenizer: it puts nothing around a text but its end token."""
        return self


class TokenizationError(ValueError):
    """A tokenizer or a chat template fails on what it is given; the message is the reason, in one line."""


@contextmanager
def tokenization(what: str | None = None) -> Iterator[None]:
    """Raise whatever a library raises inside the block as a `TokenizationError`. what: names who fails."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TokenizationError(reason if what is None else f"{what} fails ({reason})") from None


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer read from a `tokenizer.json`; optionally with an end token.

    Its members are those of `ByteTokenizer`. special_tokens: False where it puts nothing else around any text. Methods
    raise `TokenizationError` where it fails.
    """

    path: str
    fingerprint: str
    end_token_id: int | None
    vocab_size: int
    #: that of the library
    inner: Any = field(compare=False, repr=False)
    special_tokens: bool = True

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return () if self.end_token_id is None else (self.end_token_id,)

    def encode(self, texts: Sequence[str], special_tokens: bool = True) -> list[np.ndarray]:
        for text in texts:
            text.encode()  # raises UnicodeEncodeError
        with self._working():
            found = self.inner.encode_batch_fast(texts, add_special_tokens=special_tokens and self.special_tokens)
            return [np.array([*encoding.ids, *self.end_tokens], np.uint32) for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        with self._working():
            return self.inner.decode(tokens, skip_special_tokens=True)

    def entry(self, token: int) -> str | None:
        return self.inner.id_to_token(token)

    def without_special_tokens(self) -> "FileTokenizer":
        return replace(self, special_tokens=False, fingerprint=f"{self.fingerprint}-plain")

    def _working(self) -> AbstractContextManager[None]:
        return tokenization(f"the tokenizer {self.path!r}")


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(name: str | None, end_token: str | None = None) -> Tokenizer:
    """Load the tokenizer "bytes" (or None), a `tokenizer.json`, or one from a folder that holds such a file.

    end_token: the text of the token to put after every document (any text for bytes); None or "" for none.

    Raises: `CorpusError` if there is no such file, it is no tokenizer, or it lacks the end token.
    """
    if name is None or name == "bytes":
        return ByteTokenizer(end_token=bool(end_token))
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if (path.parent / "tokenizer.model").is_file() and not path.exists():
        raise CorpusError(
            f"{str(path.parent)!r} has a tokenizer.model but no tokenizer.json, which is read; save_pretrained of "
            "transformers' AutoTokenizer writes one"
        )
    if not path.is_file():
        raise CorpusError(f"no tokenizer at {str(path)!r}; give 'bytes', a tokenizer.json, or a folder that holds one")
    # Missing, it is no fault of the file's.
    import tokenizers

    try:
        content = read_bytes(path)
        with tokenization():
            inner = tokenizers.Tokenizer.from_str(content.decode())
            # A saved tokenizer may truncate or pad its input, but texts must stay complete.
            inner.no_truncation()
            inner.no_padding()
        # The largest id decides, since added tokens may leave gaps.
        vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        end_token_id = inner.token_to_id(end_token) if end_token else None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{str(path)!r} is no Hugging Face tokenizer file: {error}") from error
    if end_token and end_token_id is None:
        raise CorpusError(f"the tokenizer {str(path)!r} has no token {end_token!r} to end documents with")
    fingerprint = hashlib.blake2b(content + str(end_token_id).encode(), digest_size=16).hexdigest()
    return FileTokenizer(str(path), fingerprint, end_token_id, vocab_size, inner)


def ended(text: str, end: str | None) -> str:
    """The text with the text of an end token, if there is one and it does not end so already."""
    return text if not end or text.endswith(end) else text + end


def own_end_token(name: str | None) -> str | None:
    """The text of the token with which a tokenizer's own settings end a text; None if they name none."""
    path = Path(name or "bytes").expanduser()
    settings = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
    if name in (None, "bytes") or not settings.is_file():
        return None
    try:
        found = read_json_object(settings).get("eos_token")
    except ValueError as error:
        raise CorpusError(str(error)) from None
    return found.get("content") if isinstance(found, dict) else found


def byte_level_alphabet() -> dict[str, int]:
    """The bytes by the characters with which byte-level vocabularies write them."""
    # A byte is written as itself where that can be printed, and else as one of the characters from 256 on.
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = (byte for byte in range(256) if byte not in printed)
    return {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}


def save_byte_tokenizer(folder: Path, end_token: bool) -> None:
    """Write `ByteTokenizer` as files that transformers loads, with the same ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if end_token:
        made.add_special_tokens([AddedToken(END_ENTRY, special=True)])
        settings["eos_token"] = END_ENTRY
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# ---- The text and the bytes of single tokens, by which log-probabilities are reported


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenTexts:
    """The text and the bytes of each token of a tokenizer; without one, tokens have neither.

    A decoder shows what a token adds to a text that has begun, and what it is as the first, where some strip a space.
    Only bytes that are no whole characters are read from the vocabulary itself: <0xNN>, or the byte-level alphabet.
    """

    #: the tokenizer; None if there is none
    tokenizer: Tokenizer | None
    #: a text that has begun: a token that is a letter or a word, or none where the vocabulary has no such token
    _begun: list[int]
    #: (token, True if it is the first) -> its bytes, as far as they were asked for
    _bytes: dict[tuple[int, bool], bytes | None]
    #: the bytes by the characters of a byte-level vocabulary
    _alphabet: dict[str, int]

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer, self._bytes, self._alphabet = tokenizer, {}, byte_level_alphabet()
        ids = range(0 if tokenizer is None else tokenizer.vocab_size)
        self._begun = next(([one] for one in ids if tokenizer is not None and tokenizer.decode([one]).isalnum()), [])

    def bytes_of(self, token: int, first: bool) -> bytes | None:
        """The bytes that a token adds to a text; None for one that has no text, such as a special one.

        first: True if no token with a text comes before it.
        """
        if (token, first) not in self._bytes:
            self._bytes[token, first] = self._found(token, first)
        return self._bytes[token, first]

    def names(self, tokens: Iterable[int], first: bool) -> dict[int, str]:
        """The name of each token, no two alike: the earlier of two tokens with one text is named by it.

        A name is the token's text, or bytes:\\xNN for what is no whole characters; failing that, the vocabulary's
        entry, as for special tokens, or else <ID>.
        """
        names: dict[int, str] = {}
        for token in dict.fromkeys(tokens):
            content, taken = self.bytes_of(token, first), set(names.values())
            possible = [None if self.tokenizer is None else self.tokenizer.entry(token), f"<{token}>"]
            if content is not None:
                try:
                    possible.insert(0, content.decode())
                except UnicodeDecodeError:
                    possible.insert(0, "bytes:" + "".join(f"\\x{byte:02x}" for byte in content))
            name = next((name for name in possible if name is not None and name not in taken), f"<<{token}>>")
            while name in taken:
                name = f"<{name}>"
            names[token] = name
        return names

    def _found(self, token: int, first: bool) -> bytes | None:
        if self.tokenizer is None:
            return None
        if first and self.bytes_of(token, first=False) is None:
            return None
        before = [] if first else self._begun
        text = self.tokenizer.decode([*before, token])[len(self.tokenizer.decode(before)) :]
        if _BROKEN in text:
            return self._raw(self.tokenizer.entry(token) or text)
        return text.encode() if text or first else None

    def _raw(self, entry: str) -> bytes:
        """The bytes of an entry that is no whole characters, or holds U+FFFD itself."""
        if byte := _BYTE.fullmatch(entry):
            return bytes([int(byte[1], 16)])
        if all(character in self._alphabet for character in entry):
            return bytes(self._alphabet[character] for character in entry)
        return entry.encode()
