"""Batches of packed sequences, their split into microbatches, and the corpora behind them."""

from penstock.data.checks import (
    BatchError,
    CorpusError,
    ItemTooLong,
    LoaderStateError,
    PartitionError,
    SplitError,
    TooFewItems,
)
from penstock.data.corpus import Corpus, CorpusSpec, load_corpus
from penstock.data.loader import BatchSize, DataShard, Loader, validation_batches
from penstock.data.packed import NO_LABEL, Extent, PackedBatch
from penstock.data.split import (
    MicroBatchSpec,
    Split,
    SplitCounts,
    agree,
    check_lengths,
    count,
    merge,
    part_of,
    reorder,
    split,
    take_apart,
)
from penstock.data.store import DocumentPacking, WindowPacking, pack

__all__ = [
    "NO_LABEL",
    "BatchError",
    "BatchSize",
    "Corpus",
    "CorpusError",
    "CorpusSpec",
    "DataShard",
    "DocumentPacking",
    "Extent",
    "ItemTooLong",
    "Loader",
    "LoaderStateError",
    "MicroBatchSpec",
    "PackedBatch",
    "PartitionError",
    "Split",
    "SplitCounts",
    "SplitError",
    "TooFewItems",
    "WindowPacking",
    "agree",
    "check_lengths",
    "count",
    "load_corpus",
    "merge",
    "pack",
    "part_of",
    "reorder",
    "split",
    "take_apart",
    "validation_batches",
]
