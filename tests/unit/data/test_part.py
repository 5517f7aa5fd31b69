"""Parts of a batch that several ranks share: every row once, and labels stay with the tokens before them."""

import pytest
import torch

from penstock.data import NO_LABEL, PackedBatch, part_of
from penstock.data.packed import Extent
from penstock.model.sequences import cut_sequences


def example() -> PackedBatch:
    batch = PackedBatch.from_sequences(
        {
            "tokens": [[[10, 11, 12, 13, 14], [20, 21]], [[30, 31, 32, 33]]],
            "labels": [[[11, 12, 13, 14, NO_LABEL], [21, NO_LABEL]], [[31, 32, 33, NO_LABEL]]],
        },
        metadata={"source": ["a", "b"]},
    )
    batch = batch.with_key("advantages", torch.arange(8.0), Extent.TRANSITION)
    return batch.with_key("rewards", torch.tensor([0.5, 1.5]), Extent.ITEM)


@pytest.mark.shows(82)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_parts_hold_every_row_once_and_labels_reach_across_borders(num_ranks: int) -> None:
    batch = example()
    parts = [part_of(batch, pieces) for pieces in cut_sequences(batch.sequence_lengths("tokens"), num_ranks)]
    for key in ("tokens", "labels", "advantages"):
        assert sorted(torch.cat([part[key] for part in parts]).tolist()) == sorted(batch[key].tolist())
    for part in parts:
        follows = dict(zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True))
        assert [follows[token] for token in part["tokens"].tolist()] == part["labels"].tolist()
        assert torch.equal(part["rewards"], batch["rewards"])
        assert (part.ids, part.metadata) == (batch.ids, batch.metadata)
        for key in part.keys:
            assert sum(part.sequence_lengths(key)) == len(part[key])
            assert [len(item) for item in part.lengths[key]] == [len(item) for item in batch.lengths[key]]


def test_metadata_alone_is_cut_alike() -> None:
    batch = example()
    for pieces in cut_sequences(batch.sequence_lengths("tokens"), 2):
        part, bare = part_of(batch, pieces), part_of(batch.without_data(), pieces)
        assert bare.data is None and bare.lengths == part.lengths
