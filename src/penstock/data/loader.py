"""Endless batches of a corpus: shuffled by seed, disjoint over data-parallel ranks, resumable exactly at any step.

The items of all epochs, each epoch in its own order, form one endless sequence. A step takes the next items of it for
data-parallel rank 0, then for rank 1, and so on. So the position in the sequence is the whole state, no item is ever
left out, every rank takes every step, and the items of a step do not depend on the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from penstock.data.checks import CorpusError, LoaderStateError
from penstock.data.packed import PackedBatch
from penstock.data.store import Packing

_DTYPES = {"tokens": torch.int64, "labels": torch.int64}
_TRAILING_SHAPES: dict[str, tuple[int, ...]] = {"tokens": (), "labels": ()}


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


class Loader:
    """An endless iterator of this rank's batches, one per step, with keys "tokens" and "labels".

    An item's id is epoch * num_items + item, so the ids of a batch are unique even if an epoch ends in it. with_data:
    False gives the same batches as metadata alone, without reading a token.

    Raises: `CorpusError` if an item does not fit the size of a batch.
    """

    #: the items, made of documents
    _packing: Packing
    #: items or tokens of a batch
    _size: BatchSize
    #: the seed of each epoch's order
    _seed: int
    #: the part of each batch that this rank takes
    _shard: DataShard
    #: False for batches of metadata alone
    _with_data: bool
    #: items taken so far, over all epochs and ranks
    _position: int
    #: the epoch at hand, and the order of its items
    _order: tuple[int, np.ndarray] | None

    def __init__(
        self,
        packing: Packing,
        size: BatchSize,
        *,
        seed: int = 0,
        shard: DataShard | None = None,
        with_data: bool = True,
    ):
        if type(seed) is not int or seed < 0:
            raise CorpusError(f"the seed is {seed!r}; it must be a whole number of at least 0")
        size.check(packing)
        self._packing = packing
        self._size = size
        self._seed = seed
        self._shard = shard or DataShard()
        self._with_data = with_data
        self._position = 0
        self._order = None

    @property
    def epoch(self) -> int:
        """The epoch of the next step's first item, from 0."""
        return self._position // self._packing.num_items

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PackedBatch:
        first, last = self._position, self._position
        for rank in range(self._shard.num_ranks):
            start = last
            last = self._end_of_batch(start)
            if rank == self._shard.rank:
                first, end = start, last
        batch = _batch(self._packing, self._ids(first, end), self._with_data)
        self._position = last
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step as plain JSON values; the same on every rank and for any number of ranks."""
        num_items = self._packing.num_items
        return {
            "epoch": self._position // num_items,
            "position": self._position % num_items,
            "seed": self._seed,
            "fingerprint": self._packing.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, even on another number of ranks or with another batch size.

        Raises: `LoaderStateError` if it was taken from another corpus, packing or seed, or is not a loader's state.
        """
        expected = self.state_dict()
        if set(state) != set(expected):
            raise LoaderStateError(f"a loader's state has {sorted(expected)}, this one has {sorted(state)}")
        if state["fingerprint"] != expected["fingerprint"]:
            raise LoaderStateError(
                f"the saved position belongs to another corpus or packing ({state['fingerprint']}, "
                f"here {expected['fingerprint']}); resume with the corpus, tokenizer and packing it was saved with"
            )
        if state["seed"] != self._seed:
            raise LoaderStateError(f"the saved position belongs to seed {state['seed']}, this loader has {self._seed}")
        epoch, position = state["epoch"], state["position"]
        num_items = self._packing.num_items
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < num_items:
            raise LoaderStateError(f"epoch {epoch!r}, position {position!r} is no place among {num_items} items")
        self._position = epoch * num_items + position

    def _end_of_batch(self, start: int) -> int:
        """The end, in the endless sequence, of the batch that begins at `start`."""
        if self._size.items is not None:
            return start + self._size.items
        assert self._size.tokens is not None
        room, end = self._size.tokens, start
        # items have at least one token, and the longest fits: read as far ahead as the budget lasts for longest items
        step = max(1, self._size.tokens // self._packing.longest_item)
        while True:
            for item in self._packing.lengths(self._items(end, end + step)):
                room -= sum(item)
                if room < 0:
                    return end
                end += 1

    def _items(self, start: int, stop: int) -> np.ndarray:
        """The items at these positions of the endless sequence."""
        num_items = self._packing.num_items
        pieces = []
        while start < stop:
            epoch, at = divmod(start, num_items)
            piece = self._order_of(epoch)[at : at + stop - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)

    def _ids(self, start: int, stop: int) -> np.ndarray:
        num_items = self._packing.num_items
        return self._items(start, stop) + np.arange(start, stop) // num_items * num_items

    def _order_of(self, epoch: int) -> np.ndarray:
        """The epoch's order of items, from seed and epoch alone; the last one is kept."""
        if self._order is None or self._order[0] != epoch:
            # RandomState, unlike Generator, promises the same numbers in every release of numpy (NEP 19)
            bits = np.random.MT19937(np.random.SeedSequence([self._seed, epoch]))
            self._order = (epoch, np.random.RandomState(bits).permutation(self._packing.num_items))
        return self._order[1]


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
