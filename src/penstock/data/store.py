"""The tokens of a corpus end to end, in memory or in memory-mapped files, and which of them are learned.

Shape suffixes: T tokens of all documents end to end.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from penstock.data.checks import CorpusError
from penstock.data.packed import NO_LABEL
from penstock.settings.json_files import read_json_object

TOKEN_FILE, LEARNED_FILE = "tokens.bin", "learned.bin"


class EncodedDocument(NamedTuple):
    """A document's token ids, and for each whether a model learns to predict it; None where it learns all."""

    name: str
    tokens: np.ndarray
    learned: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents' tokens end to end; nothing is copied out of a memory map before it is used.

    tokens: [T] unsigned, as narrow as the vocabulary allows. offsets: int64 [documents + 1], the first token of each
    document and the end; strictly increasing, since no document is empty. max_token: the largest id that occurs.
    fingerprint: a hash of tokens, boundaries and what is learned. learned: bool [T], the tokens that a model learns to
    predict, so that they are labels; None for all.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    max_token: int
    fingerprint: str
    learned: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """The number of documents, none of them empty."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def labels(self, places: np.ndarray | slice) -> np.ndarray:
        """The tokens at these places as labels, int64: their ids, or `NO_LABEL` where they are not learned."""
        labels = self.tokens[places].astype(np.int64)
        if self.learned is not None:
            labels[~self.learned[places]] = NO_LABEL
        return labels

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `CorpusError` if a token does not fit a model's vocabulary."""
        if self.max_token >= vocab_size:
            position = int(np.argmax(self.tokens >= vocab_size))
            document = int(np.searchsorted(self.offsets, position, "right")) - 1
            raise CorpusError(
                f"{self.name} holds token {int(self.tokens[position])} in document {document}, "
                f"outside the model's vocabulary of {vocab_size}; vocab_size must be at least {self.max_token + 1}"
            )

    def part(self, name: str, first: int, last: int) -> "TokenStore":
        """A store of the tokens from `first` up to `last`; documents are cut where they cross an end."""
        inner = self.offsets[(self.offsets > first) & (self.offsets < last)]
        offsets = np.concatenate([[first], inner, [last]]).astype(np.int64) - first
        tokens = self.tokens[first:last]
        fingerprint = hashlib.blake2b(f"{self.fingerprint} {first} {last}".encode(), digest_size=16).hexdigest()
        learned = None if self.learned is None else self.learned[first:last]
        return TokenStore(name, tokens, offsets, int(tokens.max()), fingerprint, learned)


class StoreWriter:
    """Writes documents one after another to binary streams, which the caller owns.

    A second stream takes what is learned; left out, all of it is.
    """

    #: the least type that has room for every token
    dtype: np.dtype[Any]
    #: where tokens are written
    _stream: BinaryIO
    #: where a byte for each token is written, 1 where it is learned
    _learned: BinaryIO | None
    #: tokens of each document so far
    _lengths: list[int]
    #: the largest token so far
    _max_token: int
    #: hash of what was written so far
    _hash: Any

    def __init__(self, stream: BinaryIO, vocab_size: int, learned: BinaryIO | None = None):
        self.dtype = np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._stream = stream
        self._learned = learned
        self._lengths = []
        self._max_token = -1
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, documents: Iterable[EncodedDocument]) -> None:
        """Append documents, except those without tokens."""
        for _, tokens, learned in documents:
            if not len(tokens):
                continue
            content = tokens.astype(self.dtype, copy=False).tobytes()
            self._stream.write(content)
            self._hash.update(content)
            if self._learned is not None:
                assert learned is not None and len(learned) == len(tokens)
                content = learned.astype(np.bool_, copy=False).tobytes()
                self._learned.write(content)
                self._hash.update(content)
            self._lengths.append(len(tokens))
            self._max_token = max(self._max_token, int(tokens.max()))

    def finish(self, name: str, tokens: np.ndarray, learned: np.ndarray | None = None) -> TokenStore:
        """Make the store over `tokens` and `learned`, which the caller has mapped from the streams' content."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64)
        self._hash.update(self.dtype.str.encode() + offsets.tobytes())
        return TokenStore(name, tokens, offsets, self._max_token, self._hash.hexdigest(), learned)


def save_index(store: TokenStore, folder: Path) -> None:
    """Write the boundaries and facts that `load_store` needs beside the token file."""
    np.save(folder / "offsets.npy", store.offsets)
    facts = {"dtype": store.tokens.dtype.str, "max_token": store.max_token, "fingerprint": store.fingerprint}
    (folder / "store.json").write_text(json.dumps(facts))


def load_store(name: str, folder: Path) -> TokenStore:
    """Load a store from its folder, its tokens as a memory map.

    Raises: `CorpusError` if files are missing, or their sizes contradict each other.
    """
    try:
        facts = read_json_object(folder / "store.json")
        offsets = np.load(folder / "offsets.npy")
        tokens = _mapped(folder / TOKEN_FILE, np.dtype(facts["dtype"]), offsets[-1])
        has_learned = (folder / LEARNED_FILE).is_file()
        learned = _mapped(folder / LEARNED_FILE, np.dtype(np.bool_), offsets[-1]) if has_learned else None
        return TokenStore(name, tokens, offsets, facts["max_token"], facts["fingerprint"], learned)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CorpusError(f"the token cache {str(folder)!r} is damaged ({error}); delete it to make it anew") from error


def _mapped(path: Path, dtype: np.dtype[Any], length: int) -> np.ndarray:
    # an empty file cannot be mapped
    values = np.memmap(path, dtype=dtype, mode="r") if length else np.empty(0, dtype)
    if len(values) != length:
        raise ValueError(f"{len(values)} tokens where {length} are expected")
    return values
