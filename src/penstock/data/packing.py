"""Packing of documents into items of a length that a model can take, with labels for every token.

Shape suffixes: B items, S tokens of an item, T tokens of all items end to end.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.data.checks import CorpusError, Lengths
from penstock.data.packed import NO_LABEL
from penstock.data.store import TokenStore
from penstock.settings import PackingKind


class Packing(Protocol):
    """A corpus as numbered items: their lengths without reading a token, and their tokens on request."""

    @property
    def num_items(self) -> int: ...

    @property
    def longest_item(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any item would."""
        ...

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        """The lengths of each item's sequences."""
        ...

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """The items' tokens [T] and labels [T], int64, end to end."""
        ...


@dataclass(frozen=True, eq=False)
class WindowPacking:
    """All documents end to end, cut into windows of exactly `sequence_tokens`; the remainder is dropped.

    A window is read with one extra token, which is the label of its last token and the first token of the next window.
    Documents stay apart: a window holds a sequence for each document or piece of one in it, and the last token of a
    document has no label. cross_documents: a window is one sequence instead, and every token has a label; equal
    lengths are the fastest.

    Raises: `CorpusError` if there are too few tokens for a window.
    """

    store: TokenStore
    sequence_tokens: int
    cross_documents: bool = False

    def __post_init__(self) -> None:
        _check_sequence_tokens(self.sequence_tokens)
        if self.num_items < 1:
            raise CorpusError(
                f"{self.store.name} holds {self.store.num_tokens} tokens; "
                f"a window of {self.sequence_tokens} needs at least {self.sequence_tokens + 1}"
            )

    @property
    def num_items(self) -> int:
        """The number of whole windows."""
        return (self.store.num_tokens - 1) // self.sequence_tokens

    @property
    def longest_item(self) -> int:
        """The length of every window."""
        return self.sequence_tokens

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any item would."""
        return _fingerprint(self.store, f"window {self.sequence_tokens} {self.cross_documents}")

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        """The lengths of each window's sequences."""
        S = self.sequence_tokens
        if self.cross_documents:
            return ((S,),) * len(items)
        return tuple(
            tuple(np.diff(ends, prepend=0, append=S).tolist()) if len(ends) else (S,)
            for ends in (ends[: np.searchsorted(ends, S)] for ends in self._ends(items))
        )

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """The windows' tokens [T] and labels [T]."""
        S = self.sequence_tokens
        starts_B = np.asarray(items, dtype=np.int64) * S
        places_BS = starts_B[:, None] + np.arange(S)
        tokens_BS = self.store.tokens[places_BS].astype(np.int64)
        labels_BS = self.store.labels(places_BS + 1)
        if not self.cross_documents:
            for row, ends in enumerate(self._ends(items)):
                labels_BS[row, ends - 1] = NO_LABEL
        return torch.from_numpy(tokens_BS.reshape(-1)), torch.from_numpy(labels_BS.reshape(-1))

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
class DocumentPacking:
    """An item for every document, or for every piece of one longer than `sequence_tokens`; lengths are unequal.

    A document's last token is only a label, so every token of an item has a label, and a document of a single token
    gives no item.

    Raises: `CorpusError` if no document has two tokens.
    """

    store: TokenStore
    sequence_tokens: int

    def __post_init__(self) -> None:
        _check_sequence_tokens(self.sequence_tokens)
        if self.num_items < 1:
            raise CorpusError(f"{self.store.name} has no document of two or more tokens: there is nothing to predict")

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
        """The number of documents and pieces."""
        return len(self._pieces[0])

    @property
    def longest_item(self) -> int:
        """The largest number of tokens of an item."""
        return self._longest

    @cached_property
    def _longest(self) -> int:
        return int(self._pieces[1].max())

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any item would."""
        return _fingerprint(self.store, f"document {self.sequence_tokens}")

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        """The length of each item's only sequence."""
        return tuple((length,) for length in self._pieces[1][np.asarray(items, dtype=np.int64)].tolist())

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """The items' tokens [T] and labels [T]."""
        chosen = np.asarray(items, dtype=np.int64)
        starts, lengths = (column[chosen].tolist() for column in self._pieces)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        pieces = [self.store.tokens[start:end] for start, end in zip(starts, ends, strict=True)]
        tokens_T = np.concatenate(pieces).astype(np.int64)
        labels_T = np.concatenate([self.store.labels(slice(a + 1, b + 1)) for a, b in zip(starts, ends, strict=True)])
        return torch.from_numpy(tokens_T), torch.from_numpy(labels_T)


@dataclass(frozen=True, eq=False)
class PairPacking:
    """An item for every pair of documents, which are its two sequences, the better one first.

    The labels are the tokens that are learned of each: those that a reward model rates.
    """

    store: TokenStore

    @property
    def num_items(self) -> int:
        """The number of pairs."""
        return self.store.num_documents // 2

    @property
    def longest_item(self) -> int:
        """The largest number of tokens of a pair."""
        return int(np.diff(self.store.offsets[::2]).max())

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any item would."""
        return _fingerprint(self.store, "pairs")

    def lengths(self, items: Sequence[int] | np.ndarray) -> Lengths:
        """The lengths of each pair's sequences."""
        better_B = 2 * np.asarray(items, dtype=np.int64)
        lengths = np.diff(self.store.offsets)
        return tuple(zip(lengths[better_B].tolist(), lengths[better_B + 1].tolist(), strict=True))

    def fill(self, items: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """The pairs' tokens [T] and labels [T]."""
        better_B = 2 * np.asarray(items, dtype=np.int64)
        starts, ends = (self.store.offsets[better_B + n].tolist() for n in (0, 2))
        places_T = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
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


def _fingerprint(store: TokenStore, packing: str) -> str:
    return hashlib.blake2b(f"{store.fingerprint} {packing}".encode(), digest_size=16).hexdigest()
