"""Tokens of many documents in one compact array, with the documents' boundaries."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from penstock.data.errors import CorpusError


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents' tokens end to end; nothing is copied out of a memory map before it is asked for.

    tokens: [T] unsigned, as narrow as the vocabulary allows. offsets: int64 [documents + 1], the first token of each
    document and the end; strictly increasing, since no document is empty. max_token: the largest id that occurs.
    fingerprint: a hash of tokens and boundaries.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    max_token: int
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """All tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """The number of documents, none of them empty."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

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
        """The tokens from `first` up to `last` as a store of their own; documents are cut where they cross an end."""
        inner = self.offsets[(self.offsets > first) & (self.offsets < last)]
        offsets = np.concatenate([[first], inner, [last]]).astype(np.int64) - first
        tokens = self.tokens[first:last]
        fingerprint = hashlib.blake2b(f"{self.fingerprint} {first} {last}".encode(), digest_size=16).hexdigest()
        return TokenStore(name, tokens, offsets, int(tokens.max()), fingerprint)


class StoreWriter:
    """Writes documents' tokens one after another to a binary stream, which the caller owns."""

    def __init__(self, stream: BinaryIO, vocab_size: int):
        self.dtype = np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._stream = stream
        self._lengths: list[int] = []
        self._max_token = -1
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, documents: Iterable[np.ndarray]) -> None:
        """Append documents; one without tokens is left out."""
        for tokens in documents:
            if len(tokens):
                content = tokens.astype(self.dtype, copy=False).tobytes()
                self._stream.write(content)
                self._hash.update(content)
                self._lengths.append(len(tokens))
                self._max_token = max(self._max_token, int(tokens.max()))

    def finish(self, name: str, tokens: np.ndarray) -> TokenStore:
        """The store over `tokens`, which the caller has mapped from the stream's content."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64)
        self._hash.update(self.dtype.str.encode() + offsets.tobytes())
        return TokenStore(name, tokens, offsets, self._max_token, self._hash.hexdigest())


def save_index(store: TokenStore, folder: Path) -> None:
    """Write what `load_store` needs beside the token file: boundaries and facts."""
    np.save(folder / "offsets.npy", store.offsets)
    facts = {"dtype": store.tokens.dtype.str, "max_token": store.max_token, "fingerprint": store.fingerprint}
    (folder / "store.json").write_text(json.dumps(facts))


def load_store(name: str, folder: Path) -> TokenStore:
    """A store from its folder, its tokens as a memory map.

    Raises: `CorpusError` if files are missing, or their sizes contradict each other.
    """
    try:
        facts = json.loads((folder / "store.json").read_text())
        offsets = np.load(folder / "offsets.npy")
        dtype = np.dtype(facts["dtype"])
        # an empty file cannot be mapped
        tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r") if offsets[-1] else np.empty(0, dtype)
        if len(tokens) != offsets[-1]:
            raise ValueError(f"{len(tokens)} tokens where {offsets[-1]} are expected")
        return TokenStore(name, tokens, offsets, facts["max_token"], facts["fingerprint"])
    except (OSError, ValueError, KeyError) as error:
        raise CorpusError(f"the token cache {str(folder)!r} is damaged ({error}); delete it to make it anew") from error
