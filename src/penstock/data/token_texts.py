"""The text and the bytes of single tokens, by which log-probabilities are reported."""

import re
from collections.abc import Iterable

from penstock.data.tokenizer import Tokenizer, byte_level_alphabet

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
            taken = set(names.values())
            names[token] = next(name for name in self._possible_names(token, first) if name not in taken)
        return names

    def _possible_names(self, token: int, first: bool) -> Iterable[str]:
        content = self.bytes_of(token, first)
        if content is not None:
            try:
                yield content.decode()
            except UnicodeDecodeError:
                yield "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        entry = None if self.tokenizer is None else self.tokenizer.entry(token)
        if entry is not None:
            yield entry
        name = f"<{token}>"
        while True:
            yield name
            name = f"<{name}>"

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
