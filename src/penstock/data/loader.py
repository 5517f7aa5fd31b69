"""Endless batches of a corpus: shuffled by seed, disjoint over data-parallel ranks, resumable exactly at any step.

The items of all epochs, each epoch in its own order, form one endless sequence. A step takes the next items of it for
data-parallel rank 0, then for rank 1, and so on. So the position in the sequence is the whole state, no item is ever
left out, every rank takes every step, and the items of a step do not depend on the number of ranks.

Shape suffixes: T tokens end to end, B items, S tokens of a window.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from penstock.data.corpus import TokenStore
from penstock.data.packed import NO_LABEL, Lengths, PackedBatch
from penstock.data.sources import CorpusError
from penstock.settings import PackingKind

_DTYPES = {"tokens": torch.int64, "labels": torch.int64}
_TRAILING_SHAPES: dict[str, tuple[int, ...]] = {"tokens": (), "labels": ()}


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
    @abstractmethod
    def num_tokens(self) -> int:
        """The tokens of all items."""

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

    @property
    def num_tokens(self) -> int:
        return self.num_items * self.sequence_tokens

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

    @property
    def num_tokens(self) -> int:
        return int(self._pieces[1].sum())

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

    @property
    def num_tokens(self) -> int:
        return self.store.num_tokens

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
    return np.concatenate([np.arange(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])


# ---- Endless batches of the items


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a data-parallel rank's batch: a number of items, or as many as fit a token budget."""

    items: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.items is None) == (self.tokens is None):
            raise CorpusError(
                f"a batch is sized by items or by tokens, not items={self.items} and tokens={self.tokens}"
            )
        value = self.items if self.tokens is None else self.tokens
        if type(value) is not int or value < 1:
            raise CorpusError(f"the size of a batch is {value!r}; it must be a whole number of at least 1")

    def check(self, packing: Packing) -> None:
        """Raise `CorpusError` if an item exceeds the budget."""
        if self.tokens is not None and packing.longest_item > self.tokens:
            raise CorpusError(
                f"a batch may hold {self.tokens} tokens, but an item has {packing.longest_item}; "
                "raise the budget or shorten sequence_tokens"
            )


@dataclass(frozen=True, slots=True)
class DataShard:
    """A data-parallel rank and their number. All ranks of one pipeline share it, and so get equal batches."""

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise CorpusError(f"data-parallel rank {self.rank} is not one of {self.num_ranks} ranks")


@dataclass(eq=False)
class Loader:
    """An endless iterator of this rank's batches, one per step, with keys "tokens" and "labels".

    packing: the items, made of documents. seed: decides each epoch's order. shard: the part of each batch that this
    rank takes. An item's id is epoch * num_items + item, so the ids of a batch are unique even if an epoch ends in it.
    with_data: False gives the same batches as metadata alone, without reading a token.

    Raises: `CorpusError` if an item does not fit the size of a batch.
    """

    packing: Packing
    size: BatchSize
    _: KW_ONLY
    seed: int = 0
    shard: DataShard | None = None
    with_data: bool = True
    #: items taken so far, over all epochs and ranks
    _position: int = field(default=0, init=False)
    #: the epoch at hand, and the order of its items
    _order: tuple[int, np.ndarray] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            raise CorpusError(f"the seed is {self.seed!r}; it must be a whole number of at least 0")
        self.size.check(self.packing)

    @property
    def epoch(self) -> int:
        """The epoch of the next step's first item, from 0."""
        return self._position // self.packing.num_items

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        shard = self.shard or DataShard()
        ends = [self._position]
        for _ in range(shard.num_ranks):
            ends.append(self._end_of_batch(ends[-1]))
        first, end = ends[shard.rank], ends[shard.rank + 1]
        num_items = self.packing.num_items
        ids = self.items(first, end) + np.arange(first, end) // num_items * num_items
        batch = _batch(self.packing, ids, self.with_data)
        self._position = ends[-1]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step as plain JSON values; the same on every rank and for any number of ranks."""
        num_items = self.packing.num_items
        return {
            "epoch": self._position // num_items,
            "position": self._position % num_items,
            "seed": self.seed,
            "fingerprint": self.packing.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, even on another number of ranks or with another batch size.

        Raises: `CorpusError` if it was taken from another corpus, packing or seed, or is not a loader's state.
        """
        expected = self.state_dict()
        if set(state) != set(expected):
            raise CorpusError(f"a loader's state has {sorted(expected)}, this one has {sorted(state)}")
        if state["fingerprint"] != expected["fingerprint"]:
            raise CorpusError(
                f"the saved position belongs to another corpus or packing ({state['fingerprint']}, "
                f"here {expected['fingerprint']}); resume with the corpus, tokenizer and packing it was saved with"
            )
        if state["seed"] != self.seed:
            raise CorpusError(f"the saved position belongs to seed {state['seed']}, this loader has {self.seed}")
        epoch, position = state["epoch"], state["position"]
        num_items = self.packing.num_items
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < num_items:
            raise CorpusError(f"epoch {epoch!r}, position {position!r} is no place among {num_items} items")
        self._position = epoch * num_items + position

    def _end_of_batch(self, start: int) -> int:
        """The end, in the endless sequence, of the batch that begins at `start`."""
        if self.size.items is not None:
            return start + self.size.items
        assert self.size.tokens is not None
        room, end = self.size.tokens, start
        # items have at least one token, and the longest fits: read as far ahead as the budget lasts for longest items
        step = max(1, self.size.tokens // self.packing.longest_item)
        while True:
            for item in self.packing.lengths(self.items(end, end + step)):
                room -= sum(item)
                if room < 0:
                    return end
                end += 1

    def items(self, start: int, stop: int) -> np.ndarray:
        """The items at these positions of the endless sequence; an epoch's order comes from seed and epoch alone."""
        num_items = self.packing.num_items
        pieces = []
        while start < stop:
            epoch, at = divmod(start, num_items)
            if self._order is None or self._order[0] != epoch:
                # RandomState, unlike Generator, promises the same numbers in every release of numpy (NEP 19)
                bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
                self._order = (epoch, np.random.RandomState(bits).permutation(num_items))
            pieces.append(self._order[1][at : at + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces)


def validation_batches(
    packing: Packing,
    size: BatchSize,
    *,
    max_items: int | None = None,
    shard: DataShard | None = None,
    with_data: bool = True,
) -> tuple[PackedBatch, ...]:
    """This rank's part of a fixed list of batches: the same items in every run and on any number of ranks.

    max_items: the largest number of items, spread evenly over the corpus; None for all. All ranks get the same number
    of batches, disjoint, none empty, and together complete; if batches would hold a single item and the items do not
    divide by the ranks, some hold two.

    Raises: `CorpusError` if there are fewer items than ranks, or an item does not fit the size of a batch.
    """
    shard = shard or DataShard()
    size.check(packing)
    if max_items is not None and max_items < 1:
        raise CorpusError(f"max_items is {max_items}; validation needs at least 1 item")
    num_items = min(packing.num_items, max_items or packing.num_items)
    if num_items < shard.num_ranks:
        raise CorpusError(f"validation has {num_items} items, fewer than {shard.num_ranks} data-parallel ranks")
    items = np.arange(num_items) * packing.num_items // num_items
    per_batch = size.items or max(1, (size.tokens or 0) // packing.longest_item)
    num_steps = min(-(-num_items // (per_batch * shard.num_ranks)), num_items // shard.num_ranks)
    parts = np.array_split(items, num_steps * shard.num_ranks)
    return tuple(_batch(packing, part, with_data) for part in parts[shard.rank :: shard.num_ranks])


def _batch(packing: Packing, ids: np.ndarray | Sequence[int], with_data: bool) -> PackedBatch:
    items = np.asarray(ids) % packing.num_items
    lengths = packing.lengths(items)
    return PackedBatch.trusted(
        ids=tuple(np.asarray(ids).tolist()),
        lengths={"tokens": lengths, "labels": lengths},
        dtypes=_DTYPES,
        trailing_shapes=_TRAILING_SHAPES,
        data=dict(zip(("tokens", "labels"), packing.fill(items), strict=True)) if with_data else None,
        metadata={},
    )
