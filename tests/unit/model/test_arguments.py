"""What a layer asks for by name, as far as one call shows it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model import Given, Parameters, Sequences

SEQUENCES = Sequences.from_lengths([2, 1])
KEYS = {"sequences": torch.tensor([7]), "positions": torch.tensor([0, 1, 0]), "other": torch.tensor([1])}


class Asks(nn.Module):
    def forward(self, x: Tensor, sequences: Any, positions: Tensor | None = None, scale: float = 1.0) -> Any:
        return sequences, positions, scale


def called(module: nn.Module) -> Any:
    args, kwargs = Parameters.of(module).arguments(torch.zeros(3, 1), SEQUENCES, Given(KEYS))
    return module(*args, **kwargs)


def test_the_sequences_are_those_of_the_microbatch_whatever_key_bears_their_name():
    assert Parameters.of(Asks()).keys.intersection(KEYS) == {"positions"}
    sequences, positions, scale = called(Asks())
    assert sequences is SEQUENCES
    assert positions is KEYS["positions"]
    assert scale == 1.0


def test_a_forward_that_is_itself_a_partial_keeps_what_it_has_fixed():
    layer, fixed = Asks(), torch.tensor([9])
    layer.forward = partial(Asks.forward, layer, positions=fixed, scale=2.0)
    assert Parameters.of(layer).names == ("sequences",)
    assert called(layer) == (SEQUENCES, fixed, 2.0)
