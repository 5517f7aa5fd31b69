"""What tests of engines share: documents that are drawn from a seed, and the end of an engine with its groups."""

from collections.abc import Iterable

import torch

from penstock import Engine, PackedBatch


def documents(seed: int, lengths: Iterable[int], vocabulary: int) -> PackedBatch:
    """Documents of these lengths, whose tokens the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_documents([torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths])


def closed(engine: Engine) -> None:
    """Close an engine and the groups of its ranks, so that the process may make another."""
    engine.close()
    engine.grid.close()
