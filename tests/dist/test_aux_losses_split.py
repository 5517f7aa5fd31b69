"""Losses of routers and of multi-token prediction are the same however a batch is split, on any layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from penstock import NO_LABEL, Engine, EngineOptions, Layout, LearningRate, MicroBatchSpec, OptimizerConfig, PackedBatch
from penstock.model import decoder_units
from penstock.settings import Precision
from tests.dist.grid_cases import SPARSE, VOCABULARY
from tests.dist.launch import run_ranks

# fp64 and three steps of Adam: rounding stays well below.
TOLERANCE = 1e-9
NUM_ITEMS = 10
MODEL = replace(SPARSE, num_predictions=2)
KINDS = {"sequence_balance", "global_balance", "z", "prediction"}


def batch_of(step: int, dp_rank: int, dp: int) -> PackedBatch:
    """Documents of which the first and every fifth have no label, so that some microbatches have none."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 12, (NUM_ITEMS,), generator=generator).tolist()
    documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    labels = [torch.cat([tokens[1:], torch.tensor([NO_LABEL])]) for tokens in documents]
    for number in range(0, NUM_ITEMS, 5):
        labels[number].fill_(NO_LABEL)
    return PackedBatch.from_sequences({"tokens": documents[dp_rank::dp], "labels": labels[dp_rank::dp]})


def some_steps(rank: int, layout: Layout, schedule: str, num: int) -> list[dict[str, float]]:
    options = EngineOptions(
        schedule, precision=Precision.FP64, optimizer=OptimizerConfig(LearningRate(1e-2)), timeout_s=60.0
    )
    engine = Engine(lambda groups: decoder_units(MODEL, groups=groups), MODEL.hidden_size, layout, options)
    found = []
    for step in range(2):
        batch = batch_of(step, engine.grid.dp_rank, layout.dp)
        taken = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=num))
        assert taken.num_microbatches == num
        found.append({"loss": taken.loss, "grad_norm": taken.grad_norm, **taken.aux_losses.losses})
    engine.close()
    return found


CASES = [
    (Layout(), "1f1b", 2),
    (Layout(), "1f1b", 5),
    (Layout(), "1f1b", NUM_ITEMS),
    (Layout(pp=2), "zb-h1", NUM_ITEMS),
    (Layout(pp=2), "dualpipe", NUM_ITEMS),
    (Layout(pp=4), "1f1b", 7),
    (Layout(dp=2), "1f1b", NUM_ITEMS // 2),
    (Layout(pp=2, dp=2, ep=2), "combined-1f1b", NUM_ITEMS // 2),
    (Layout(pp=2, tp=2), "1f1b", NUM_ITEMS),
    (Layout(pp=2, cp=2), "1f1b", NUM_ITEMS),
]


@cache
def alone() -> list[dict[str, float]]:
    return some_steps(0, Layout(), "1f1b", 1)


@pytest.mark.shows(114)
@pytest.mark.parametrize(("layout", "schedule", "num"), CASES, ids=str)
def test_no_term_depends_on_the_number_of_microbatches(layout: Layout, schedule: str, num: int) -> None:
    labels = [item["labels"] for item in batch_of(0, 0, 1).unpack()]
    assert sum(bool((own == NO_LABEL).all()) for own in labels) == 2
    wanted = alone()
    assert all(step.keys() > KINDS for step in wanted)
    for found in run_ranks(layout.world_size, some_steps, layout, schedule, num, timeout_s=60.0):
        for own, expected in zip(found, wanted, strict=True):
            assert own == pytest.approx(expected, abs=TOLERANCE, rel=0)
