"""A batch that a user's own layers cannot take is refused by field, sequence and value, before anything is computed."""

from collections.abc import Callable
from functools import partial
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


class Views(nn.Linear):
    """Knows the memory of its weight by another name, too."""

    def __init__(self, where: str, other: torch.Tensor) -> None:
        super().__init__(8, 8)
        if where == "attribute":
            self.raw = [{"w": self.weight.data}]
        elif where == "buffer":
            self.register_buffer("part", self.weight.data[2:4, 1:])
        elif where == "flat":
            self.flat = torch.zeros(80)
            self.weight, self.bias = nn.Parameter(self.flat[:64].view(8, 8)), nn.Parameter(self.flat[64:72])
        elif where == "parameter":
            self.twin = nn.Parameter(self.weight.data)
        elif where == "transposed":
            self.weight = nn.Parameter(other.data[:8].t())
        elif where == "data":
            self.weight.data = other.data[8:]
        elif where == "columns":
            both = torch.randn(8, 16)
            self.weight, self.twin = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])
        elif where == "rows":
            both = torch.randn(16, 8)
            self.weight, self.twin = nn.Parameter(both[:8]), nn.Parameter(both[8:])
        elif where == "itself":
            self.same, self.raw = self.weight, [self.weight, other]
        elif where == "spectral":
            torch.nn.utils.spectral_norm(self)


READ = r"layers\.1\.{} shares its memory with layers\.1\.{}, which the engine gives .*; read the parameter itself$"
TIE = (
    r"layers\.1\.{} shares its memory with layers\.{}, .*; assign the parameter itself \(self\.weight = other\.weight\)"
)


@pytest.mark.shows(161)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("made attribute", READ.format("raw", "weight")),
        ("made parameter", TIE.format("twin", r"1\.weight")),
        ("attribute", READ.format("raw", "weight")),
        ("buffer", READ.format("part", "weight")),
        ("flat", READ.format("flat", "weight")),
        ("parameter", TIE.format("twin", r"1\.weight")),
        ("transposed", TIE.format("weight", r"0\.weight")),
        ("data", TIE.format("weight", r"0\.weight")),
    ],
)
def test_another_name_of_a_parameters_memory_is_refused(where: str, words: str) -> None:
    first = nn.Embedding(16, 8)
    maker = partial(Views, where.removeprefix("made "), first.weight)
    layer = maker if where.startswith("made ") else maker()
    with pytest.raises(ValueError, match=words):
        Engine.from_layers([first, layer, nn.Linear(8, 16)], hidden_size=8, device="cpu")


@pytest.mark.shows(161)
@pytest.mark.parametrize("where", ["columns", "rows", "itself", "spectral", "lstm"])
def test_parameters_that_are_read_or_lie_side_by_side_are_taken_twice(where: str) -> None:
    first = nn.Embedding(16, 8)
    own = nn.Sequential(nn.utils.spectral_norm(nn.LSTM(8, 8), "weight_hh_l0")) if where == "lstm" else None
    layers = [first, own or Views(where, first.weight), nn.Linear(8, 16)]
    for _ in range(2):
        engine = Engine.from_layers(layers, hidden_size=8, device="cpu")
        if own is None:
            assert engine.train_batch(batch()).success
        engine.close()
