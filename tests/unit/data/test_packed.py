"""PackedBatch: what it refuses, and that no method loses, mixes or invents anything."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import NO_LABEL, BatchError, Extent, PackedBatch, PartitionError
from tests.unit.data.batches import assert_equal, batches

few = settings(max_examples=60, deadline=None)

GOOD = {
    "ids": (7, "b"),
    "lengths": {"tokens": ((2, 1), (3,)), "rewards": ((1,), (1,))},
    "dtypes": {"tokens": torch.int64, "rewards": torch.float32},
    "trailing_shapes": {"tokens": (), "rewards": (4,)},
    "data": {"tokens": torch.arange(6), "rewards": torch.ones(2, 4)},
    "metadata": {"source": ("x", "y")},
}
TOKENS, REWARDS = GOOD["data"]["tokens"], GOOD["data"]["rewards"]
BAD = [
    ({"ids": (7, 7)}, "ids", "occurs more than once"),
    ({"ids": ()}, "ids", "at least one item"),
    ({"ids": (7, 1.5)}, "ids", "1.5 is a"),
    ({"ids": (7, True)}, "ids", "True is a"),
    ({"lengths": {}}, "lengths", "at least one key"),
    ({"lengths": {**GOOD["lengths"], "tokens": ((2, 1),)}}, "lengths['tokens']", "1 items, but there are 2 ids"),
    ({"lengths": {**GOOD["lengths"], "tokens": ((2, 0), (3,))}}, "lengths['tokens']", "has length 0;"),
    ({"lengths": {**GOOD["lengths"], "tokens": ((2, -1), (3,))}}, "lengths['tokens']", "has length -1;"),
    ({"lengths": {**GOOD["lengths"], "tokens": ((2, 1), ())}}, "lengths['tokens']", "has no sequence"),
    ({"lengths": {**GOOD["lengths"], "tokens": ((2, 1.0), (3,))}}, "lengths['tokens']", "length 1.0, "),
    ({"lengths": {**GOOD["lengths"], "tokens": ((2, 1), (torch.tensor(3),))}}, "lengths['tokens']", "not an int"),
    ({"lengths": {**GOOD["lengths"], "masks": ((1,), (1,))}}, "dtypes", "lacks ['masks']"),
    ({"dtypes": {"tokens": torch.int64}}, "dtypes", "lacks ['rewards']"),
    ({"dtypes": {"tokens": "int64", "rewards": torch.float32}}, "dtypes['tokens']", "'int64' is not a torch dtype"),
    ({"dtypes": {"tokens": torch.int32, "rewards": torch.float32}}, "data['tokens']", "declared is torch.int32"),
    ({"trailing_shapes": {"tokens": ()}}, "trailing_shapes", "lacks ['rewards']"),
    ({"trailing_shapes": {"tokens": (), "rewards": (-4,)}}, "trailing_shapes['rewards']", "(-4,) is not a shape"),
    ({"trailing_shapes": {"tokens": (), "rewards": (5,)}}, "data['rewards']", "promise (2, 5)"),
    ({"data": {"tokens": TOKENS}}, "data", "lacks ['rewards']"),
    ({"data": {"tokens": TOKENS[:5], "rewards": REWARDS}}, "data['tokens']", "shape (5,)"),
    ({"data": {"tokens": TOKENS.tolist(), "rewards": REWARDS}}, "data['tokens']", "expected a tensor"),
    ({"metadata": {"source": ("x",)}}, "metadata['source']", "1 values, but"),
    ({"metadata": {"source": "xy"}}, "metadata['source']", "expected a list"),
]


@pytest.mark.shows(75)
@pytest.mark.parametrize(("change", "field", "problem"), BAD)
def test_invalid_batches_are_refused_by_field(change, field, problem):
    with pytest.raises(BatchError) as caught:
        PackedBatch(**{**GOOD, **change})
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert str(caught.value).startswith(field)
    assert pickle.loads(pickle.dumps(caught.value)).field == field


def test_a_valid_batch_answers_what_it_holds():
    batch = PackedBatch(**GOOD)
    assert batch.num_items == 2
    assert batch.num_tokens == 6
    assert batch.sequence_lengths() == (2, 1, 3)
    assert batch.item_lengths() == (3, 3)
    assert torch.equal(batch["tokens"], TOKENS)
    assert "rewards" in batch and "labels" not in batch
    with pytest.raises(BatchError, match="labels"):
        _ = batch["labels"]
    with pytest.raises(BatchError, match="metadata alone"):
        _ = batch.without_data()["tokens"]


def test_sequences_are_packed_in_order_and_labels_are_shifted_within_each():
    batch = PackedBatch.from_documents([[5, 6, 7], [[8, 9], [10]], torch.tensor([11, 12])])
    assert batch.lengths["tokens"] == ((3,), (2, 1), (2,))
    assert batch["tokens"].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert batch["labels"].tolist() == [6, 7, NO_LABEL, 9, NO_LABEL, NO_LABEL, 12, NO_LABEL]
    assert batch.sequence_lengths("labels") == batch.sequence_lengths("tokens")


@pytest.mark.parametrize("bad", [[[]], [[1, 2], []], [3, 4], [], [[1], [0.5]], [[[1], []]]])
def test_sequences_that_cannot_be_packed_are_refused(bad):
    with pytest.raises(BatchError, match="tokens"):
        PackedBatch.from_sequences({"tokens": bad})


def test_keys_of_every_extent_can_be_added():
    batch = PackedBatch.from_sequences({"tokens": [[1, 2, 3], [4, 5]]})
    batch = batch.with_key("mask", torch.ones(5, dtype=torch.bool))
    batch = batch.with_key("advantages", torch.ones(3), Extent.TRANSITION)
    batch = batch.with_key("rewards", torch.ones(2, 7), Extent.ITEM)
    assert batch.sequence_lengths("advantages") == (2, 1)
    assert batch.trailing_shapes["rewards"] == (7,)
    with pytest.raises(BatchError, match="returns"):
        batch.with_key("returns", torch.ones(5), Extent.TRANSITION)
    with pytest.raises(BatchError, match="mask"):
        batch.with_key("mask", torch.ones(5))


@few
@given(batches())
def test_unpacking_and_gathering_give_the_batch_back(batch: PackedBatch):
    assert_equal(PackedBatch.gather(batch.unpack()), batch)
    meta = batch.without_data()
    assert_equal(PackedBatch.gather(meta.unpack()), meta)
    assert_equal(PackedBatch.gather(batch.unpack(), keys=["tokens"]), batch.select(["tokens"]))


@few
@given(batches(), st.data())
def test_contiguous_parts_cover_the_batch(batch: PackedBatch, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, batch.num_items)))) or [batch.num_items]
    cuts = [c for c in cuts if c < batch.num_items] + [batch.num_items]
    ranges = [range(a, b) for a, b in zip([0, *cuts], cuts)]
    parts = batch.split_with(ranges)
    assert [part.num_items for part in parts] == [len(r) for r in ranges]
    assert_equal(PackedBatch.gather(parts), batch)
    for one, other in zip(parts, batch.split_with([len(r) for r in ranges]), strict=True):
        assert_equal(one, other)
    # a part is a batch that would pass validation by itself
    for part in parts:
        assert_equal(part.with_data(part.data or {}), part)


@pytest.mark.parametrize("parts", [[2], [2, 2], [3, 0], [0, 3], [4, -1], [], [range(2), range(1, 3)], [range(1, 3)]])
def test_parts_that_do_not_cover_are_refused(parts):
    batch = PackedBatch.from_sequences({"tokens": [[1], [2], [3]]})
    with pytest.raises(PartitionError):
        batch.split_with(parts)


@few
@given(batches(), st.data())
def test_reordering_moves_whole_items(batch: PackedBatch, data):
    indices = data.draw(st.permutations(range(batch.num_items)))
    moved = batch.reorder(indices)
    singles = batch.unpack()
    assert_equal(PackedBatch.gather([singles[i] for i in indices]), moved)
    inverse = sorted(range(len(indices)), key=indices.__getitem__)
    assert_equal(moved.reorder(inverse), batch)
    assert moved.without_data().digest() == batch.without_data().reorder(indices).digest()


@pytest.mark.parametrize("indices", [[0, 0, 1], [0, 1], [0, 1, 3], [0, 1, 2, 3]])
def test_what_is_no_permutation_is_refused(indices):
    with pytest.raises(PartitionError):
        PackedBatch.from_sequences({"tokens": [[1], [2], [3]]}).reorder(indices)


@few
@given(batches(), st.integers(0, 2**40))
def test_shuffling_follows_the_seed_and_spares_no_data(batch: PackedBatch, seed: int):
    shuffled = batch.shuffled(seed)
    assert_equal(shuffled, batch.shuffled(seed))
    assert set(shuffled.ids) == set(batch.ids)
    assert shuffled.without_data().digest() == batch.without_data().shuffled(seed).digest()


@few
@given(batches())
def test_keys_can_be_selected_renamed_and_updated(batch: PackedBatch):
    renamed = batch.remap({"tokens": "prompts"})
    assert set(renamed.keys) == {"prompts"} | (set(batch.keys) - {"tokens"})
    assert_equal(renamed.remap({"prompts": "tokens"}), batch)
    rest = batch.select([key for key in batch.keys if key != "tokens"])
    updated = rest.update(batch.select(["tokens"]))
    assert_equal(updated.select(batch.keys), batch)
    with pytest.raises(BatchError, match="keys: no 'nothing'"):
        batch.select(["nothing"])
    with pytest.raises(BatchError, match="two keys the same name"):
        batch.remap({"tokens": "rewards"})
    if batch.num_items > 1:
        with pytest.raises(BatchError, match="same items in the same order"):
            batch.update(batch.reorder([*range(1, batch.num_items), 0]))
    with pytest.raises(BatchError, match="metadata alone"):
        batch.update(batch.without_data())


def test_batches_that_do_not_fit_are_not_gathered():
    batch = PackedBatch.from_sequences({"tokens": [[1]]})
    others = [
        (batch, "ids"),
        (PackedBatch.from_sequences({"masks": [[1]]}, ids=[1]), "keys"),
        (PackedBatch.from_sequences({"tokens": [[0.5]]}, ids=[1]), "dtypes"),
        (PackedBatch.from_sequences({"tokens": [torch.ones(1, 2, dtype=torch.int64)]}, ids=[1]), "trailing_shapes"),
        (PackedBatch.from_sequences({"tokens": [[1]]}, ids=[1], metadata={"a": [1]}), "metadata"),
        (PackedBatch.from_sequences({"tokens": [[1]]}, ids=[1]).without_data(), "data"),
    ]
    for other, field in others:
        with pytest.raises(BatchError, match=f"^{field}: "):
            PackedBatch.gather([batch, other])
    with pytest.raises(BatchError, match="nothing to gather"):
        PackedBatch.gather([])


@few
@given(batches())
def test_metadata_survives_json(batch: PackedBatch):
    again = PackedBatch.from_json(batch.to_json())
    assert_equal(again, batch.without_data())
    assert again.digest() == batch.digest()
    assert_equal(again.with_data(batch.data or {}), batch)


@pytest.mark.parametrize("text", ["{", "[]", '{"ids": [1]}'])
def test_json_that_is_no_batch_is_refused(text):
    with pytest.raises(BatchError, match="json"):
        PackedBatch.from_json(text)


@few
@given(batches(), batches())
def test_digests_differ_where_shapes_differ(one: PackedBatch, other: PackedBatch):
    same = (one.ids, one.lengths) == (other.ids, other.lengths)
    assert (one.digest() == other.digest()) == same
    assert 0 <= one.digest() < 2**63
    assert one.digest() == one.without_data().digest() == pickle.loads(pickle.dumps(one)).digest()


def test_digest_is_the_same_in_every_process():
    # written down once: another process, Python or machine must find the same
    assert PackedBatch.from_sequences({"tokens": [[1, 2], [3]]}, ids=[0, "a"]).digest() == 986739467060711981


def test_digest_tells_ids_lengths_and_keys_apart():
    batch = PackedBatch.from_sequences({"tokens": [[[1, 2], [3]], [4]]})
    others = [
        PackedBatch.from_sequences({"tokens": [[[1], [2, 3]], [4]]}),
        PackedBatch.from_sequences({"tokens": [[1, 2, 3], [4]]}),
        PackedBatch.from_sequences({"tokens": [[[1, 2], [3]], [4]]}, ids=["0", "1"]),
        batch.reorder([1, 0]),
        batch.remap({"tokens": "labels"}),
        batch.unpack()[0],
    ]
    assert len({b.digest() for b in [batch, *others]}) == 1 + len(others)


def test_data_moves_to_a_device():
    batch = PackedBatch.from_documents([[1, 2, 3]])
    assert_equal(batch.to("cpu"), batch)
    assert batch.to("meta")["tokens"].device.type == "meta"
    assert_equal(batch.without_data().to("meta"), batch.without_data())
