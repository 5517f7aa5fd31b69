"""Ranks that share every sequence train as one process does: loss, gradient norm, gradients and weights."""

from typing import Any

import pytest
import torch

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.data import NO_LABEL, part_of, split
from penstock.engine import Engine, EngineOptions
from penstock.model import cross_entropy_sum, cut_sequences, decoder_units
from penstock.settings import ContextForm, ModelConfig, OptimizerConfig, Precision
from tests.dist.grid_cases import SPARSE
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, sliding_window=9
)
LENGTHS = (13, 4, 16, 7, 2, 11, 30, 1)
# fp64 sums of a few hundred terms of size one: rounding stays well below.
TOLERANCE = 1e-10


def batch_of() -> PackedBatch:
    """Documents with some tokens without a label."""
    generator = torch.Generator().manual_seed(0)
    whole = PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in LENGTHS])
    labels = whole["labels"].clone()
    labels[::5] = NO_LABEL
    return whole.with_data({"tokens": whole["tokens"], "labels": labels})


SHORT = (([1, 2], [3]), ([4, 5, 6, 7, 8], [9, 2]), ([3], [4, 5]))
"""Documents of which microbatches with fewer tokens than ranks are made."""


def train_on_few_tokens(rank: int, layout: Layout, form: ContextForm, experts: bool) -> list[Any]:
    config = SPARSE if experts else CONFIG
    options = EngineOptions(
        precision=Precision.FP64, attention=form, optimizer=OptimizerConfig(clip_norm=0.5), timeout_s=30.0
    )
    engine = Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)
    found: list[Any] = []
    for documents in SHORT:
        result = engine.train_batch(PackedBatch.from_documents(documents), micro_batches=MicroBatchSpec(num=2))
        found += [result.loss, result.grad_norm, *result.aux_losses.losses.values()]
    logits = engine.forward(PackedBatch.from_documents([[1], [2, 3]]), micro_batches=MicroBatchSpec(num=2))
    engine.close()
    return [found, [] if logits is None else logits.flatten().tolist()]


@pytest.mark.shows(86, 113)
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        (Layout(cp=2), ContextForm.RING),
        (Layout(cp=2), ContextForm.ALL_TO_ALL),
        (Layout(pp=2, cp=2), ContextForm.RING),
        (Layout(cp=4), ContextForm.RING),
    ],
    ids=str,
)
def test_a_microbatch_with_fewer_tokens_than_ranks_runs(layout: Layout, form: ContextForm, experts: bool) -> None:
    [(wanted, wanted_logits)] = run_ranks(1, train_on_few_tokens, Layout(), ContextForm.RING, experts)
    by_rank = run_ranks(layout.world_size, train_on_few_tokens, layout, form, experts)
    assert any(logits for _, logits in by_rank) and len(wanted) >= 6
    for found, logits in by_rank:
        assert found == pytest.approx(wanted, rel=0, abs=TOLERANCE)
        assert not logits or logits == pytest.approx(wanted_logits, rel=0, abs=TOLERANCE)


def means_of_parts(rank: int) -> float:
    engine = Engine(
        lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, Layout(cp=2), EngineOptions()
    )
    batch = batch_of()
    of_parts = engine.train_batch(batch, normalize="microbatch_mean", micro_batches=MicroBatchSpec(num=2)).loss
    engine.close()
    return of_parts


@pytest.mark.shows(21)
def test_the_mean_of_microbatches_is_one_over_context_ranks_too() -> None:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size)
    batch = batch_of()
    means = []
    for microbatch in split(batch, MicroBatchSpec(num=2)).microbatches:
        logits = engine.forward(microbatch)
        pieces = cut_sequences(microbatch.sequence_lengths(), 2)
        for of_rank in pieces:
            rows = part_of(microbatch.with_key("row", torch.arange(len(logits))), of_rank)
            own = logits[rows["row"]]
            num_labels = int((rows["labels"] != NO_LABEL).sum())
            assert num_labels
            means.append(float(cross_entropy_sum(own, rows["labels"])) / num_labels)
    for of_parts in run_ranks(2, means_of_parts, timeout_s=60.0):
        assert of_parts == pytest.approx(sum(means) / len(means), rel=1e-5)
