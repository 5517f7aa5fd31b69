"""The tokens of a corpus end to end, in memory or in memory-mapped files, and which of them are learned.

Shape suffixes: T tokens of all documents end to end.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.data.checks import CorpusError, Lengths
from penstock.data.packed import NO_LABEL
from penstock.io.files import read_json_object
from penstock.settings import PackingKind

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
    """Writes documents one after another into a folder's files, or in memory where it is None.

    marks_learned: documents say what is learned of them.
    """

    #: the least type that has room for every token
    _dtype: np.dtype[Any]
    #: the folder, which is made
    _folder: Path | None
    #: where tokens are written, and where a byte for each token, 1 where it is learned
    _streams: list[BinaryIO]
    #: tokens of each document so far
    _lengths: list[int]
    #: the largest token so far
    _max_token: int
    #: hash of what was written so far
    _hash: Any

    def __init__(self, vocab_size: int, marks_learned: bool, folder: Path | None) -> None:
        self._dtype = np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._folder, self._lengths, self._max_token = folder, [], -1
        if folder is not None:
            folder.mkdir()
        names = (TOKEN_FILE, LEARNED_FILE) if marks_learned else (TOKEN_FILE,)
        self._streams = [BytesIO() if folder is None else (folder / name).open("wb") for name in names]
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, documents: Iterable[EncodedDocument]) -> None:
        """Append documents, except those without tokens."""
        for _, tokens, learned in documents:
            if not len(tokens):
                continue
            columns = [tokens.astype(self._dtype, copy=False)]
            if len(self._streams) > 1:
                assert learned is not None and len(learned) == len(tokens)
                columns.append(learned.astype(np.bool_, copy=False))
            for stream, column in zip(self._streams, columns, strict=True):
                content = column.tobytes()
                stream.write(content)
                self._hash.update(content)
            self._lengths.append(len(tokens))
            self._max_token = max(self._max_token, int(tokens.max()))

    def finish(self, name: str) -> TokenStore:
        """The store of all documents; that of a folder has its tokens there alone, where `load_store` maps them."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64)
        self._hash.update(self._dtype.str.encode() + offsets.tobytes())
        written = [stream.getvalue() if isinstance(stream, BytesIO) else b"" for stream in self._streams]
        columns = map(np.frombuffer, written, (self._dtype, np.dtype(np.bool_)))
        tokens, learned = next(columns), next(columns, None)
        self.close()
        if self._folder is not None:
            np.save(self._folder / "offsets.npy", offsets)
            facts = {"dtype": self._dtype.str, "max_token": self._max_token, "fingerprint": self._hash.hexdigest()}
            (self._folder / "store.json").write_text(json.dumps(facts))
        return TokenStore(name, tokens, offsets, self._max_token, self._hash.hexdigest(), learned)

    def close(self) -> None:
        """Close the files; again, does nothing."""
        for stream in self._streams:
            stream.close()


def load_store(name: str, folder: Path) -> TokenStore:
    """Load a store from its folder, its tokens as a memory map.

    Raises: `CorpusError` if files are missing, or their sizes contradict each other.
    """

    def mapped(file: str, dtype: np.dtype[Any]) -> np.ndarray:
        # an empty file cannot be mapped
        values = np.memmap(folder / file, dtype=dtype, mode="r") if offsets[-1] else np.empty(0, dtype)
        if len(values) != offsets[-1]:
            raise ValueError(f"{len(values)} tokens where {offsets[-1]} are expected")
        return values

    try:
        facts = read_json_object(folder / "store.json")
        offsets = np.load(folder / "offsets.npy")
        tokens = mapped(TOKEN_FILE, np.dtype(facts["dtype"]))
        learned = mapped(LEARNED_FILE, np.dtype(np.bool_)) if (folder / LEARNED_FILE).is_file() else None
        return TokenStore(name, tokens, offsets, facts["max_token"], facts["fingerprint"], learned)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CorpusError(f"the token cache {str(folder)!r} is damaged ({error}); delete it to make it anew") from error


# ---- Packing of documents into items of a length that a model can take, with labels for every token


@dataclass(frozen=True, eq=False)
class Packing(ABC):
    """A corpus as numbered items: their lengths without reading a token, and their tokens on request."""

    store: TokenStore

    @property
    @abstractmethod
    def num_items(self) -> int:
        """The number of items."""

    @cached_property
    @abstractmethod
    def longest_item(self) -> int:
        """The largest number of tokens of an item."""

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any item would."""
        return hashlib.blake2b(f"{self.store.fingerprint} {self}".encode(), digest_size=16).hexdigest()

    @abstractmethod
    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        """The lengths of each item's sequences."""

    @abstractmethod
    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """The items' tokens [T] and labels [T], int64, end to end."""


@dataclass(frozen=True, eq=False)
class WindowPacking(Packing):
    """All documents end to end, cut into windows of exactly `sequence_tokens`; the remainder is dropped.

    A window is read with one extra token, which is the label of its last token and the first token of the next window.
    Documents stay apart: a window holds a sequence for each document or piece of one in it, and the last token of a
    document has no label. cross_documents: a window is one sequence instead, and every token has a label; equal
    lengths are the fastest.

    Raises: `CorpusError` if there are too few tokens for a window.
    """

    sequence_tokens: int
    cross_documents: bool = False

    def __post_init__(self) -> None:
        _check_sequence_tokens(self.sequence_tokens)
        if self.num_items < 1:
            raise CorpusError(
                f"{self.store.name} holds {self.store.num_tokens} tokens; "
                f"a window of {self.sequence_tokens} needs at least {self.sequence_tokens + 1}"
            )

    def __str__(self) -> str:
        return f"window {self.sequence_tokens} {self.cross_documents}"

    @property
    def num_items(self) -> int:
        return (self.store.num_tokens - 1) // self.sequence_tokens

    @cached_property
    def longest_item(self) -> int:
        return self.sequence_tokens

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        S = self.sequence_tokens
        if self.cross_documents:
            return ((S,),) * len(items)
        return tuple(
            tuple(np.diff(ends, prepend=0, append=S).tolist()) if len(ends) else (S,)
            for ends in (ends[: np.searchsorted(ends, S)] for ends in self._ends(items))
        )

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        starts_B = np.asarray(items, dtype=np.int64) * self.sequence_tokens
        places_BS = starts_B[:, None] + np.arange(self.sequence_tokens)
        labels_BS = self.store.labels(places_BS + 1)
        if not self.cross_documents:
            for row, ends in enumerate(self._ends(items)):
                labels_BS[row, ends - 1] = NO_LABEL
        tokens_T = self.store.tokens[places_BS.reshape(-1)].astype(np.int64)
        return torch.from_numpy(tokens_T), torch.from_numpy(labels_BS.reshape(-1))

    def _ends(self, items: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The ends of documents in each window, counted from its start: 1 ... sequence_tokens."""
        starts_B = np.asarray(items, dtype=np.int64) * self.sequence_tokens
        offsets = self.store.offsets
        first_B = np.searchsorted(offsets, starts_B, "right")
        last_B = np.searchsorted(offsets, starts_B + self.sequence_tokens, "right")
        return [
            offsets[first:last] - start
            for first, last, start in zip(first_B.tolist(), last_B.tolist(), starts_B.tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class DocumentPacking(Packing):
    """An item for every document, or for every piece of one longer than `sequence_tokens`; lengths are unequal.

    A document's last token is only a label, so every token of an item has a label, and a document of a single token
    gives no item.

    Raises: `CorpusError` if no document has two tokens.
    """

    sequence_tokens: int

    def __post_init__(self) -> None:
        _check_sequence_tokens(self.sequence_tokens)
        if self.num_items < 1:
            raise CorpusError(f"{self.store.name} has no document of two or more tokens: there is nothing to predict")

    def __str__(self) -> str:
        return f"document {self.sequence_tokens}"

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """The start and the length of every item, int64."""
        S = self.sequence_tokens
        inputs = np.diff(self.store.offsets) - 1
        counts = -(-inputs // S)
        document = np.repeat(np.arange(len(counts)), counts)
        first_piece = np.cumsum(counts) - counts
        within = (np.arange(len(document)) - first_piece[document]) * S
        return self.store.offsets[document] + within, np.minimum(inputs[document] - within, S)

    @property
    def num_items(self) -> int:
        return len(self._pieces[0])

    @cached_property
    def longest_item(self) -> int:
        return int(self._pieces[1].max())

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        return tuple((length,) for length in self._pieces[1][np.asarray(items, dtype=np.int64)].tolist())

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        starts, lengths = (column[np.asarray(items, dtype=np.int64)] for column in self._pieces)
        places_T = _ranges(starts, starts + lengths)
        tokens_T = self.store.tokens[places_T].astype(np.int64)
        return torch.from_numpy(tokens_T), torch.from_numpy(self.store.labels(places_T + 1))


@dataclass(frozen=True, eq=False)
class PairPacking(Packing):
    """An item for every pair of documents, which are its two sequences, the better one first.

    The labels are the tokens that are learned of each: those that a reward model rates.
    """

    def __str__(self) -> str:
        return "pairs"

    @property
    def num_items(self) -> int:
        return self.store.num_documents // 2

    @cached_property
    def longest_item(self) -> int:
        return int(np.diff(self.store.offsets[::2]).max())

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        better_B = 2 * np.asarray(items, dtype=np.int64)
        lengths = np.diff(self.store.offsets)
        return tuple(zip(lengths[better_B].tolist(), lengths[better_B + 1].tolist(), strict=True))

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        better_B = 2 * np.asarray(items, dtype=np.int64)
        places_T = _ranges(self.store.offsets[better_B], self.store.offsets[better_B + 2])
        tokens_T = self.store.tokens[places_T].astype(np.int64)
        return torch.from_numpy(tokens_T), torch.from_numpy(self.store.labels(places_T))


def pack(
    store: TokenStore, kind: PackingKind | str, sequence_tokens: int, cross_documents: bool = False
) -> WindowPacking | DocumentPacking:
    """Pack a store's items by the named packing.

    Raises: `CorpusError` for an unknown kind, `cross_documents` where documents stay apart, or too little text.
    """
    try:
        kind = PackingKind(kind)
    except ValueError:
        known = [member.value for member in PackingKind]
        raise CorpusError(f"packing {kind!r} is unknown; it is one of {known}") from None
    if kind is PackingKind.WINDOW:
        return WindowPacking(store, sequence_tokens, cross_documents)
    if cross_documents:
        raise CorpusError("cross_documents needs the packing 'window': with 'document' an item never crosses documents")
    return DocumentPacking(store, sequence_tokens)


def _check_sequence_tokens(sequence_tokens: int) -> None:
    if type(sequence_tokens) is not int or sequence_tokens < 1:
        raise CorpusError(f"sequence_tokens is {sequence_tokens!r}; it must be a whole number of at least 1")


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The numbers of each range, one range after another."""
    return np.concatenate([np.arange(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
