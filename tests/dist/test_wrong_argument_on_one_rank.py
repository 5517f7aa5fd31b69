"""An argument that is wrong on one rank alone, beside the batch: all ranks hear of it at once, and go on."""

# pyright: reportArgumentType=false

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock import Engine, EngineOptions, Layout, PackedBatch
from tests.dist.launch import run_ranks

BATCH = PackedBatch.from_documents([[1, 2, 3], [4, 5]])
# The other rank would wait this long if nobody told it.
TIMEOUT_S = 60.0


def refusals(rank: int, layout: Layout, folder: Path) -> list[str]:
    torch.manual_seed(0)
    engine = Engine.from_layers(
        [nn.Embedding(16, 8), nn.Linear(8, 16)], 8, layout, EngineOptions(timeout_s=TIMEOUT_S, device="cpu")
    )
    wrong, found, start = rank == 1, [], time.monotonic()
    for call in (
        lambda: engine.evaluate(5 if wrong else [BATCH]),
        lambda: engine.forward(BATCH, broadcast="yes" if wrong else True),
        lambda: engine.train_batch(BATCH, step=3 if wrong else 2),
        lambda: engine.save(5 if wrong else folder),
        lambda: engine.save(folder, keep="1" if wrong else 1),
        lambda: engine.load("" if wrong else folder),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        found.append(str(caught.value))
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert engine.train_batch(BATCH).step == 1
    engine.close()
    return found


@pytest.mark.shows(113)
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2)], ids=str)
def test_a_wrong_argument_on_one_rank_is_named_on_all(layout: Layout, tmp_path: Path) -> None:
    words = (
        "batches=5 is an int; give a PackedBatch or a list of such",
        "broadcast = 'yes': expected bool, got str",
        "all ranks make the same calls, but rank 0 made train_batch(step=2, normalize='global') and rank 1 "
        "train_batch(step=3, normalize='global')",
        "path = 5: expected str or path, got int",
        "keep = '1': expected int, got str",
        "path = '' is empty; give a path",
    )
    first, second = run_ranks(2, refusals, layout, tmp_path)
    for other, own, text in zip(first, second, words, strict=True):
        assert own == text and text in other and ("rank 1" in other or own == other == words[2])
