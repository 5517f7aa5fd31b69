"""A batch that a user's own layers cannot take is refused by field, sequence and value, before anything is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock import BatchError, Engine, PackedBatch
from penstock.model import decoder_units
from penstock.settings import ModelConfig

TOKENS = [[1, 2, 3], [4, 5]]


def batch(**keys: Any) -> PackedBatch:
    return PackedBatch.from_sequences({"tokens": TOKENS, "labels": [[2, 3, -100], [5, -100]]} | keys)


@pytest.mark.shows(113)
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: batch(labels=[[2, -1, -100], [5, -100]]), r"data\['labels'\]: sequence 0 has -1 at its place 1"),
        (lambda: batch(labels=[[2, 3, -100], [-4, -100]]), r"data\['labels'\]: sequence 1 has -4 at its place 0"),
        (lambda: batch(tokens=[[1, 2, 3], [4, 16]]), r"data\['tokens'\]: sequence 1 has 16 at its place 1"),
        (lambda: PackedBatch.from_documents(["ab"]), r"sequences\['tokens'\]: 'ab' is not a list of numbers"),
        (lambda: PackedBatch.from_documents(None), r"sequences\['tokens'\]: a NoneType; give a list of items"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_own_layers_are_given_no_impossible_ids(made: Callable[[], PackedBatch], words: str) -> None:
    layers = [nn.Embedding(16, 8), nn.Linear(8, 16)]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    engine = Engine.from_layers(layers, hidden_size=8)
    with pytest.raises(BatchError, match=words):
        engine.train_batch(made())
    assert all(torch.equal(p, old) for p, old in zip(engine.parameters().values(), before, strict=True))
    assert engine.train_batch(batch()).success


@pytest.mark.shows(113)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_positions_of_another_type_are_refused(dtype: torch.dtype) -> None:
    config = ModelConfig(vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, max_length=32)
    engine = Engine(decoder_units(config), config.hidden_size)
    positions = [torch.arange(3).to(dtype), torch.arange(2).to(dtype)]
    with pytest.raises(BatchError, match=rf"data\['positions'\]: {dtype}; positions are torch.int64 or torch.int32"):
        engine.train_batch(batch(positions=positions))


class Asks(nn.Module):
    def forward(self, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return x + images


def test_a_batch_that_lacks_a_key_is_refused_after_one_that_had_it_too() -> None:
    engine = Engine.from_layers([nn.Embedding(16, 8), Asks(), nn.Linear(8, 16)], hidden_size=8)
    images = [torch.ones(3, 8), torch.ones(2, 8)]
    for _ in range(2):
        assert engine.train_batch(batch(images=images)).success
        with pytest.raises(ValueError, match=r"layers\.1 takes 'images', which has no default and is no key"):
            engine.train_batch(batch())
