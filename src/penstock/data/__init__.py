"""Batches of packed sequences, their split into microbatches, and the corpora behind them."""

from penstock.data.corpus import Corpus, CorpusSpec, load_corpus
from penstock.data.loader import (
    DataShard,
    DocumentPacking,
    Loader,
    WindowPacking,
    pack,
    validation_batches,
)
from penstock.data.packed import NO_LABEL, BatchError, Extent, PackedBatch, PartitionError
from penstock.data.sources import CorpusError
from penstock.data.split import (
    MicroBatchSpec,
    Split,
    SplitCounts,
    SplitError,
    agree,
    check_lengths,
    count,
    labelled_part,
    labels_of_share,
    merge,
    part_of,
    rows_with_label,
    split,
    take_apart,
)

__all__ = [
    "NO_LABEL",
    "BatchError",
    "Corpus",
    "CorpusError",
    "CorpusSpec",
    "DataShard",
    "DocumentPacking",
    "Extent",
    "Loader",
    "MicroBatchSpec",
    "PackedBatch",
    "PartitionError",
    "Split",
    "SplitCounts",
    "SplitError",
    "WindowPacking",
    "agree",
    "check_lengths",
    "count",
    "labelled_part",
    "labels_of_share",
    "load_corpus",
    "merge",
    "pack",
    "part_of",
    "rows_with_label",
    "split",
    "take_apart",
    "validation_batches",
]
