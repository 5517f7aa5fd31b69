"""Endless batches of a corpus: shuffled by seed, disjoint over data-parallel ranks, resumable exactly at any step.

The items of all epochs, each epoch in its own order, form one endless sequence. A step takes the next items of it for
data-parallel rank 0, then for rank 1, and so on. So the position in the sequence is the whole state, no item is ever
left out, every rank takes every step, and the items of a step do not depend on the number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
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
        ids = self._items(first, end) + np.arange(first, end) // num_items * num_items
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
        if state["seed"] != self.seed:
            raise LoaderStateError(f"the saved position belongs to seed {state['seed']}, this loader has {self.seed}")
        epoch, position = state["epoch"], state["position"]
        num_items = self.packing.num_items
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < num_items:
            raise LoaderStateError(f"epoch {epoch!r}, position {position!r} is no place among {num_items} items")
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
            for item in self.packing.lengths(self._items(end, end + step)):
                room -= sum(item)
                if room < 0:
                    return end
                end += 1

    def _items(self, start: int, stop: int) -> np.ndarray:
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
