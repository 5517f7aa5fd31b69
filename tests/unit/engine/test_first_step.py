"""The first step of a run says in one line what is seen of two mistakes that would train without a word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Engine, PackedBatch
from penstock.model import Sequences

WIDTH = 8
BATCH = PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 6, 4)])
ALONE = PackedBatch.from_documents([torch.arange(9)])

Loss = Callable[[Tensor, Any], Tensor]


def one_hot(microbatch: Any) -> Tensor:
    return F.one_hot(microbatch["labels"].clamp_min(0), 16).float()


def surprisals(logits: Tensor, microbatch: Any) -> Tensor:
    return logits.log_softmax(-1).gather(1, microbatch["labels"].clamp_min(0)[:, None])


MEANS: dict[str, Loss] = {
    "cross entropy": lambda logits, batch: F.cross_entropy(logits, batch["labels"]),
    "squares": lambda logits, batch: F.mse_loss(logits, one_hot(batch)),
    "Huber": lambda logits, batch: F.huber_loss(logits, one_hot(batch)),
    "yes or no": lambda logits, batch: F.binary_cross_entropy_with_logits(logits, one_hot(batch)),
    "by hand": lambda logits, batch: -surprisals(logits, batch).mean(),
    "in fp64": lambda logits, batch: (-surprisals(logits, batch)).mean().double(),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda logits, batch: F.cross_entropy(logits, batch["labels"], reduction="sum"),
    "by hand": lambda logits, batch: -surprisals(logits, batch).sum(),
    "of means over classes": lambda logits, batch: (logits - one_hot(batch)).square().mean(-1).sum(),
    "a mean times its number": lambda logits, batch: surprisals(logits, batch).mean() * batch.num_tokens,
}


def lines(caplog: pytest.LogCaptureFixture, layers: list[nn.Module], *given: Any, **named: Any) -> list[str]:
    """What a first step says; that a second says nothing."""
    engine = Engine.from_layers([nn.Embedding(16, WIDTH), *layers, nn.Linear(WIDTH, 16)], WIDTH)
    engine.train_batch(*given, **named)
    said = [record.getMessage() for record in caplog.records]
    engine.train_batch(*given, **named)
    assert len(caplog.records) == len(said)
    return said


@pytest.mark.shows(204)
@pytest.mark.parametrize("normalize", ["global", "microbatch_mean"])
@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_gives_a_mean_is_named_once(name: str, normalize: str, caplog: pytest.LogCaptureFixture) -> None:
    [line] = lines(caplog, [], BATCH, MEANS[name], normalize=normalize)
    assert line.startswith("loss_fn gives the mean of a microbatch's losses, which the number of tokens")


@pytest.mark.shows(204)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_not_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not lines(caplog, [], BATCH, SUMS[name])


def test_a_mean_that_is_weighed_as_one_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    mean = MEANS["cross entropy"]
    assert not lines(caplog, [], BATCH, mean, lambda microbatch: 1.0)
    assert not lines(caplog, [], BATCH, mean, normalize=4.0)
    assert not lines(caplog, [], BATCH, nn.CrossEntropyLoss())


class Attention(nn.Module):
    """Attends to all rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Apart(Attention):
    """Attends within each document."""

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.cat([Attention.forward(self, part) for part in x.split(list(sequences.lengths))])


@pytest.mark.shows(204)
def test_attention_to_all_rows_of_several_documents_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    layers = [Attention(), nn.TransformerEncoderLayer(WIDTH, 2, 16), Apart()]
    said = lines(caplog, layers, BATCH)
    assert [line.partition(" attends by nn.MultiheadAttention")[0] for line in said] == ["layers.1", "layers.2"]


@pytest.mark.shows(204)
def test_attention_within_each_document_or_to_the_only_one_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert not lines(caplog, [Apart()], BATCH)
    assert not lines(caplog, [Attention()], ALONE)
