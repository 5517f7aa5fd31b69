"""Batches for the tests of data: drawn at random, and compared part by part."""

import torch
from hypothesis import strategies as st

from penstock.data import PackedBatch


@st.composite
def batches(draw, max_items: int = 8, max_length: int = 12) -> PackedBatch:
    """Items of one to three sequences, ids of both kinds, keys with different lengths and trailing shapes, metadata."""
    num_items = draw(st.integers(1, max_items))
    ids = draw(st.lists(st.integers() | st.text(max_size=3), min_size=num_items, max_size=num_items, unique=True))
    length = st.integers(1, max_length)
    tokens = draw(st.lists(st.lists(length, min_size=1, max_size=3), min_size=num_items, max_size=num_items))
    lengths = {"tokens": tokens, "rewards": [[1]] * num_items}
    if draw(st.booleans()):
        lengths["values"] = [[2 * n for n in item] for item in tokens]
    data, start = {}, 0
    for key, items in lengths.items():
        rows = sum(map(sum, items))
        # every number of a batch occurs once, so that no two rows can be mistaken for each other
        data[key] = torch.arange(start, start + rows, dtype=torch.int64 if key == "tokens" else torch.float64)
        start += rows
    data["rewards"] = data["rewards"][:, None] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    metadata = {"origin": [f"item {item_id}" for item_id in ids], "weight": list(range(num_items))}
    return PackedBatch.from_data(data, lengths, ids, metadata)


def assert_equal(one: PackedBatch, other: PackedBatch) -> None:
    """The same items with the same keys, lengths, types, metadata, and data or none."""
    assert one.ids == other.ids
    assert one.lengths == other.lengths
    assert one.dtypes == other.dtypes
    assert one.trailing_shapes == other.trailing_shapes
    assert one.metadata == other.metadata
    assert (one.data is None) == (other.data is None)
    for key in one.keys if one.data is not None else ():
        assert torch.equal(one[key], other[key]), key
