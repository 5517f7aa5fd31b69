"""Packing and loading: what is in every item, and who gets which when, however the work is shared or interrupted."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import (
    NO_LABEL,
    CorpusError,
    DataShard,
    DocumentPacking,
    Loader,
    PackedBatch,
    WindowPacking,
    pack,
    validation_batches,
)
from penstock.data.corpus import TokenStore
from tests.unit.data.batches import assert_equal

few = settings(max_examples=60, deadline=None)


def store_of(lengths, name: str = "the corpus") -> TokenStore:
    """Documents of these lengths; token i of the whole is i, so that a token tells its place."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    return TokenStore(name, tokens, offsets, int(offsets[-1]) - 1, f"{name} {list(lengths)}")


class Untouchable:
    """Tokens that must not be read."""

    def __getitem__(self, index):
        raise AssertionError("tokens were read")


def untouchable(store: TokenStore) -> TokenStore:
    return TokenStore(store.name, Untouchable(), store.offsets, store.max_token, store.fingerprint)  # pyright: ignore


def sequences(packing, item: int) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of each sequence of an item."""
    tokens_T, labels_T = packing.fill([item])
    (lengths,) = packing.lengths([item])
    assert sum(lengths) == len(tokens_T) == len(labels_T)
    pieces = zip(tokens_T.split(list(lengths)), labels_T.split(list(lengths)))
    return [(tokens.tolist(), labels.tolist()) for tokens, labels in pieces]


documents = st.lists(st.integers(1, 9), min_size=1, max_size=12)


# ---- packing


@pytest.mark.shows(82)
@few
@given(documents, st.integers(1, 7))
def test_crossing_windows_hold_every_token_once_and_the_next_as_label(lengths, S):
    store = store_of(lengths)
    if store.num_tokens <= S:
        with pytest.raises(CorpusError, match=f"needs at least {S + 1}"):
            pack(store, "window", S, cross_documents=True)
        return
    packing = pack(store, "window", S, cross_documents=True)
    for item in range(packing.num_items):
        ((tokens, labels),) = sequences(packing, item)
        assert tokens == list(range(item * S, item * S + S))
        assert labels == [token + 1 for token in tokens]
    # another window would lack the label of its last token
    assert packing.num_items * S + 1 <= store.num_tokens < (packing.num_items + 1) * S + 1


@pytest.mark.shows(82)
@few
@given(documents, st.integers(1, 7))
def test_windows_keep_documents_apart(lengths, S):
    store = store_of(lengths)
    if store.num_tokens <= S:
        return
    packing = pack(store, "window", S)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    last_tokens = set((store.offsets[1:] - 1).tolist())
    for item in range(packing.num_items):
        parts = sequences(packing, item)
        assert list(chain.from_iterable(tokens for tokens, _ in parts)) == list(range(item * S, item * S + S))
        assert len({document_of[tokens[0]] for tokens, _ in parts}) == len(parts)
        for tokens, labels in parts:
            assert len({document_of[token] for token in tokens}) == 1
            assert labels == [NO_LABEL if token in last_tokens else token + 1 for token in tokens]


@few
@given(documents, st.integers(1, 7))
def test_documents_are_cut_into_pieces_in_which_everything_is_predicted(lengths, S):
    store = store_of(lengths)
    if max(lengths) < 2:
        with pytest.raises(CorpusError, match="nothing to predict"):
            pack(store, "document", S)
        return
    packing = pack(store, "document", S)
    predicted = []
    for item in range(packing.num_items):
        ((tokens, labels),) = sequences(packing, item)
        assert 1 <= len(tokens) <= packing.longest_item <= S
        assert labels == [token + 1 for token in tokens]
        predicted += labels
    # every token of the corpus is a label once, but for the first of each document
    assert predicted == [token for token in range(store.num_tokens) if token not in set(store.offsets[:-1].tolist())]


@few
@given(documents, st.integers(1, 4), st.data())
def test_items_do_not_depend_on_their_neighbours(lengths, S, data):
    store = store_of([*lengths, 6])
    for packing in (
        pack(store, "window", S),
        pack(store, "window", S, cross_documents=True),
        pack(store, "document", S),
    ):
        items = data.draw(st.lists(st.integers(0, packing.num_items - 1), min_size=1, max_size=6))
        tokens_T, labels_T = packing.fill(items)
        alone = [packing.fill([item]) for item in items]
        assert tokens_T.tolist() == list(chain.from_iterable(tokens.tolist() for tokens, _ in alone))
        assert labels_T.tolist() == list(chain.from_iterable(labels.tolist() for _, labels in alone))
        assert packing.lengths(items) == tuple(packing.lengths([item])[0] for item in items)


def test_impossible_packings_are_refused():
    with pytest.raises(CorpusError, match="cross_documents needs"):
        pack(store_of([5, 5]), "document", 4, cross_documents=True)


# ---- loading


def small_packings():
    store = store_of([5, 1, 9, 2, 7, 3, 8])
    return [WindowPacking(store, 4, cross_documents=True), WindowPacking(store, 4), DocumentPacking(store, 4)]


SIZES = [1, 3, 11]


def take(loader: Loader, num: int) -> list[PackedBatch]:
    return list(islice(loader, num))


def ids_of(batches: Iterable[PackedBatch]) -> list[int]:
    return [int(item_id) for batch in batches for item_id in batch.ids]


@pytest.mark.shows(82)
@pytest.mark.parametrize("packing", small_packings())
@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_holds_every_item_once_in_an_order_of_its_own(packing, size):
    num = packing.num_items
    ids = ids_of(take(Loader(packing, size, seed=3), 5 * num))[: 4 * num]
    epochs = [ids[start : start + num] for start in range(0, 4 * num, num)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(e * num, e * num + num)) for e in range(4)]
    assert len({tuple(item_id % num for item_id in epoch) for epoch in epochs}) == 4
    assert ids == ids_of(take(Loader(packing, size, seed=3), 5 * num))[: 4 * num]
    assert ids != ids_of(take(Loader(packing, size, seed=4), 5 * num))[: 4 * num]


@pytest.mark.shows(82)
@pytest.mark.parametrize("packing", small_packings())
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_share_the_sequence_without_overlap(packing, size, num_ranks):
    loaders = [Loader(packing, size, seed=5, shard=DataShard(rank, num_ranks)) for rank in range(num_ranks)]
    alone = ids_of(take(Loader(packing, size, seed=5), 40 * num_ranks))
    shared: list[int] = []
    for _ in range(10):
        step = [next(loader) for loader in loaders]
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        for batch in step:
            assert batch.num_items == size
        shared += ids_of(step)
    assert len(set(shared)) == len(shared)
    assert shared == alone[: len(shared)]


@pytest.mark.shows(82)
@pytest.mark.parametrize("packing", small_packings())
@pytest.mark.parametrize("size", SIZES)
def test_resuming_at_any_step_continues_exactly(packing, size):
    num_steps = 2 * packing.num_items + 3
    shard = DataShard(1, 2)
    states, uninterrupted = [], []
    loader = Loader(packing, size, seed=7, shard=shard)
    for _ in range(num_steps):
        states.append(json.dumps(loader.state_dict()))
        uninterrupted.append(next(loader))
    for step, state in enumerate(states):
        resumed = Loader(packing, size, seed=7, shard=shard)
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        for batch, expected in zip(take(resumed, 3), uninterrupted[step : step + 3]):
            assert_equal(batch, expected)


def test_resuming_on_another_number_of_ranks_leaves_nothing_out_and_repeats_nothing():
    packing = small_packings()[0]
    two = [Loader(packing, 2, seed=7, shard=DataShard(rank, 2)) for rank in range(2)]
    before = [item_id for _ in range(3) for loader in two for item_id in next(loader).ids]
    one = Loader(packing, 3, seed=7)
    one.load_state_dict(two[0].state_dict())
    together = before + ids_of(take(one, 4))
    assert together == ids_of(take(Loader(packing, 1, seed=7), len(together)))


@pytest.mark.shows(82)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", range(3))
def test_metadata_alone_is_the_same_and_reads_no_token(size, which):
    packing = small_packings()[which]
    blind = replace(packing, store=untouchable(packing.store))
    shard = DataShard(1, 2)
    with_data = take(Loader(packing, size, seed=2, shard=shard), 12)
    without = take(Loader(blind, size, seed=2, shard=shard, with_data=False), 12)
    for one, other in zip(with_data, without, strict=True):
        assert one.digest() == other.digest()
        assert_equal(one.without_data(), other)
        # what the loader makes unchecked would pass the checks
        assert_equal(other.with_data(one.data or {}), one)


def test_states_of_something_else_are_refused():
    packing = small_packings()[0]
    size = 2
    loader = Loader(packing, size, seed=1)
    state = loader.state_dict()
    others = [
        Loader(WindowPacking(packing.store, 5, True), size, seed=1),
        Loader(WindowPacking(packing.store, 4), size, seed=1),
        Loader(DocumentPacking(packing.store, 4), size, seed=1),
        Loader(WindowPacking(store_of([5, 30], "another"), 4, True), size, seed=1),
    ]
    for other in others:
        with pytest.raises(CorpusError, match="another corpus, packing or seed"):
            other.load_state_dict(state)
    with pytest.raises(CorpusError, match="seed 1, here 2"):
        Loader(packing, size, seed=2).load_state_dict(state)


def test_validation_with_fewer_items_than_ranks_is_refused():
    with pytest.raises(CorpusError, match="fewer than 3"):
        validation_batches(small_packings()[0], 1, max_items=2, shard=DataShard(0, 3))


def test_the_order_of_items_is_the_same_in_every_release():
    # written down once: a checkpoint's position must mean the same with another release of Python or numpy
    packing = WindowPacking(store_of([33]), 4, cross_documents=True)
    assert [ids_of(take(Loader(packing, 8, seed=1), 1))] == [[1, 6, 0, 3, 7, 4, 2, 5]]


# ---- validation


@few
@given(st.integers(20, 90), st.integers(1, 5), st.none() | st.integers(3, 30), st.integers(1, 3))
def test_validation_is_one_fixed_list_shared_evenly(num_tokens, per_batch, max_items, num_ranks):
    packing = WindowPacking(store_of([num_tokens]), 4, cross_documents=True)
    shards = [DataShard(rank, num_ranks) for rank in range(num_ranks)]
    lists = [validation_batches(packing, per_batch, max_items=max_items, shard=shard) for shard in shards]
    assert len({len(batches) for batches in lists}) == 1
    most = per_batch if per_batch > 1 or num_ranks == 1 else 2
    assert all(1 <= batch.num_items <= most for batches in lists for batch in batches)
    together = ids_of(chain.from_iterable(lists))
    alone = ids_of(validation_batches(packing, per_batch, max_items=max_items))
    assert sorted(together) == alone == sorted(set(alone))
    assert len(alone) == min(max_items or packing.num_items, packing.num_items)
    # spread over the corpus: no gap is more than one item wider than another
    gaps = {b - a for a, b in pairwise(alone)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    for shard, batches in zip(shards, lists):
        again = validation_batches(packing, per_batch, max_items=max_items, shard=shard, with_data=False)
        for one, other in zip(batches, again, strict=True):
            assert_equal(one.without_data(), other)
