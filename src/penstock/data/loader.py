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
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from penstock.data.corpus import TokenStore
from penstock.data.packed import NO_LABEL, Lengths, PackedBatch
from penstock.data.sources import CorpusError
from penstock.settings import PackingKind

_DTYPES = {"tokens": torch.int64, "labels": torch.int64}
_TRAILING_SHAPES: dict[str, tuple[int, ...]] = {"tokens": (), "labels": ()}

Items = Sequence[int] | np.ndarray


# ---- Packing of documents into items of a length that a model can take, with labels for every token


@dataclass(frozen=True, eq=False)
class Packing(ABC):
    """A corpus as numbered items, each a run of its tokens: their lengths without reading a token, and their tokens."""

    store: TokenStore
    #: the distance from a token to its label
    label_distance: ClassVar[int] = 1

    @cached_property
    @abstractmethod
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token and the number of tokens of every item, int64."""

    @property
    def num_items(self) -> int:
        return len(self.runs[0])

    @property
    def longest_item(self) -> int:
        """The largest number of tokens of an item."""
        return int(self.runs[1].max())

    @property
    def num_tokens(self) -> int:
        return int(self.runs[1].sum())

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any item would."""
        return hashlib.blake2b(f"{self.store.fingerprint} {self}".encode(), digest_size=16).hexdigest()

    def lengths(self, items: Items) -> Lengths:
        """The lengths of each item's sequences."""
        return tuple((length,) for length in self.runs[1][items].tolist())

    def fill(self, items: Items) -> tuple[Tensor, Tensor]:
        """The items' tokens [T] and labels [T], int64, end to end."""
        runs = zip(self.runs[0][items].tolist(), self.runs[1][items].tolist(), strict=True)
        places_T = np.concatenate([np.arange(start, start + length) for start, length in runs])
        tokens_T = self.store.tokens[places_T].astype(np.int64)
        return torch.from_numpy(tokens_T), torch.from_numpy(self._labels(places_T + self.label_distance))

    def _labels(self, places_T: np.ndarray) -> np.ndarray:
        return self.store.labels(places_T)


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
        if self.num_items < 1:
            raise CorpusError(
                f"{self.store.name} holds {self.store.num_tokens} tokens; "
                f"a window of {self.sequence_tokens} needs at least {self.sequence_tokens + 1}"
            )

    def __str__(self) -> str:
        return f"window {self.sequence_tokens} {self.cross_documents}"

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(0, self.store.num_tokens - self.sequence_tokens, self.sequence_tokens)
        return starts, np.full_like(starts, self.sequence_tokens)

    def lengths(self, items: Items) -> Lengths:
        if self.cross_documents:
            return super().lengths(items)
        starts_B, S, offsets = self.runs[0][items], self.sequence_tokens, self.store.offsets
        firsts_B, lasts_B = np.searchsorted(offsets, starts_B, "right"), np.searchsorted(offsets, starts_B + S, "left")
        return tuple(
            tuple(np.diff(offsets[first:last], prepend=start, append=start + S).tolist())
            for start, first, last in zip(starts_B.tolist(), firsts_B.tolist(), lasts_B.tolist(), strict=True)
        )

    def _labels(self, places_T: np.ndarray) -> np.ndarray:
        labels_T, offsets = super()._labels(places_T), self.store.offsets
        if not self.cross_documents:
            # No document goes on with the first token of another.
            labels_T[offsets[np.searchsorted(offsets, places_T)] == places_T] = NO_LABEL
        return labels_T


@dataclass(frozen=True, eq=False)
class DocumentPacking(Packing):
    """An item for every document, or for every piece of one longer than `sequence_tokens`; lengths are unequal.

    A document's last token is only a label, so every token of an item has a label, and a document of a single token
    gives no item.

    Raises: `CorpusError` if no document has two tokens.
    """

    sequence_tokens: int

    def __post_init__(self) -> None:
        if self.num_items < 1:
            raise CorpusError(f"{self.store.name} has no document of two or more tokens: there is nothing to predict")

    def __str__(self) -> str:
        return f"document {self.sequence_tokens}"

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        S = self.sequence_tokens
        inputs = np.diff(self.store.offsets) - 1
        counts = -(-inputs // S)
        document = np.repeat(np.arange(len(counts)), counts)
        first_piece = np.cumsum(counts) - counts
        within = (np.arange(len(document)) - first_piece[document]) * S
        return self.store.offsets[document] + within, np.minimum(inputs[document] - within, S)


@dataclass(frozen=True, eq=False)
class PairPacking(Packing):
    """An item for every pair of documents, which are its two sequences, the better one first.

    The labels are the tokens that are learned of each: those that a reward model rates.
    """

    label_distance = 0

    def __str__(self) -> str:
        return "pairs"

    @cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        borders = self.store.offsets[::2]
        return borders[:-1], np.diff(borders)

    def lengths(self, items: Items) -> Lengths:
        return tuple(map(tuple, np.diff(self.store.offsets).reshape(-1, 2)[items].tolist()))


def pack(
    store: TokenStore, kind: PackingKind | str, sequence_tokens: int, cross_documents: bool = False
) -> WindowPacking | DocumentPacking:
    """Pack a store's items by the named packing.

    Raises: `CorpusError` for `cross_documents` where documents stay apart, or too little text.
    """
    if PackingKind(kind) is PackingKind.WINDOW:
        return WindowPacking(store, sequence_tokens, cross_documents)
    if cross_documents:
        raise CorpusError("cross_documents needs the packing 'window': with 'document' an item never crosses documents")
    return DocumentPacking(store, sequence_tokens)


class DataShard(NamedTuple):
    """A data-parallel rank and their number. All ranks of one pipeline share it, and so get equal batches."""

    rank: int = 0
    num_ranks: int = 1


WHOLE = DataShard()
"""All of each step, for the only data-parallel rank."""


@dataclass(eq=False)
class Loader:
    """An endless iterator of this rank's batches, one per step, with keys "tokens" and "labels".

    packing: the items, made of documents. batch_items: those of a rank's batch. seed: decides each epoch's order.
    shard: the part of each step that this rank takes. An item's id is epoch * num_items + item, so the ids of a batch
    are unique even if an epoch ends in it. with_data: False gives the same batches as metadata alone, without reading a
    token.
    """

    packing: Packing
    batch_items: int
    _: KW_ONLY
    seed: int = 0
    shard: DataShard = WHOLE
    with_data: bool = True
    #: items taken so far, over all epochs and ranks
    _position: int = field(default=0, init=False)
    #: the epoch at hand, and the order of its items
    _order: tuple[int, np.ndarray] | None = field(default=None, init=False)

    @property
    def epoch(self) -> int:
        """The epoch of the next step's first item, from 0."""
        return self._position // self.packing.num_items

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        first = self._position + self.shard.rank * self.batch_items
        end, num_items = first + self.batch_items, self.packing.num_items
        ids = self.items(first, end) + np.arange(first, end) // num_items * num_items
        batch = _batch(self.packing, ids, self.with_data)
        self._position += self.shard.num_ranks * self.batch_items
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

        Raises: `CorpusError` if it was taken from another corpus, packing or seed.
        """
        ours = self.state_dict()
        for key in ("fingerprint", "seed"):
            if state[key] != ours[key]:
                raise CorpusError(
                    f"the saved position belongs to another corpus, packing or seed ({key} {state[key]}, here "
                    f"{ours[key]}); resume with the corpus, tokenizer, packing and seed it was saved with"
                )
        self._position = state["epoch"] * self.packing.num_items + state["position"]

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
    batch_items: int,
    *,
    max_items: int | None = None,
    shard: DataShard = WHOLE,
    with_data: bool = True,
) -> tuple[PackedBatch, ...]:
    """This rank's part of a fixed list of batches: the same items in every run and on any number of ranks.

    max_items: the largest number of items, spread evenly over the corpus; None for all. All ranks get the same number
    of batches, disjoint, none empty, and together complete; if batches would hold a single item and the items do not
    divide by the ranks, some hold two.

    Raises: `CorpusError` if there are fewer items than ranks.
    """
    num_items = min(packing.num_items, max_items or packing.num_items)
    if num_items < shard.num_ranks:
        raise CorpusError(f"validation has {num_items} items, fewer than {shard.num_ranks} data-parallel ranks")
    items = np.arange(num_items) * packing.num_items // num_items
    num_steps = min(-(-num_items // (batch_items * shard.num_ranks)), num_items // shard.num_ranks)
    parts = np.array_split(items, num_steps * shard.num_ranks)
    return tuple(_batch(packing, part, with_data) for part in parts[shard.rank :: shard.num_ranks])


def _batch(packing: Packing, ids: np.ndarray, with_data: bool) -> PackedBatch:
    items = ids % packing.num_items
    lengths = packing.lengths(items)
    return PackedBatch.trusted(
        ids=tuple(ids.tolist()),
        lengths={"tokens": lengths, "labels": lengths},
        dtypes=_DTYPES,
        trailing_shapes=_TRAILING_SHAPES,
        data=dict(zip(("tokens", "labels"), packing.fill(items), strict=True)) if with_data else None,
        metadata={},
    )
