"""Wrappers of layers hand on what the layers inside ask for by name, or the step says what is missing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, MicroBatchSpec, PackedBatch
from penstock.model import Sequences

WIDTH, VOCAB = 8, 16
LENGTHS = (5, 3)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x) * mask[:, None]


class Maybe(Masked):
    """Silently another function without its mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else super().forward(x, mask)


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.types = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor, where: Sequences, *, types: Tensor) -> Tensor:
        return x + self.types(types) / len(where.lengths)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(x, *args, **kwargs)


class Normed(Wrapper):
    """Has a second module, which asks for nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.inner(self.norms[0](x), **kwargs)


def batch(*keys: str) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    found = PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS])
    extra = {"mask": torch.rand(8, generator=generator), "types": torch.arange(8) % 3}
    for key in keys:
        found = found.with_key(key, extra[key])
    return found


def engine_of(layer: nn.Module) -> Engine:
    torch.manual_seed(0)
    return Engine.from_layers([nn.Embedding(VOCAB, WIDTH), layer, nn.Linear(WIDTH, VOCAB)], WIDTH)


def outer(layer: nn.Module, sequences: Sequences, mask: Tensor, types: Tensor, x: Tensor) -> Tensor:
    """The layer's output with all arguments written out."""
    if isinstance(layer, Normed):
        x = layer.norms[0](x)
    if isinstance(layer, Wrapper):
        return outer(layer.inner, sequences, mask, types, x)
    if isinstance(layer, Masked):
        return layer(x, mask=mask)
    return layer(x, sequences, types=types) if isinstance(layer, Typed) else layer(x)


@pytest.mark.shows(103)
@pytest.mark.parametrize(
    "make",
    [
        lambda: Wrapper(Masked()),
        lambda: Wrapper(Wrapper(Maybe())),
        lambda: Normed(Maybe()),
        lambda: Wrapper(Typed()),
    ],
)
def test_keys_reach_the_layers_inside_wrappers(make: Callable[[], nn.Module]) -> None:
    layer, given = make(), batch("mask", "types")
    by_hand = copy.deepcopy(layer).eval()
    engine = engine_of(layer)
    logits = engine.forward(given, micro_batches=MicroBatchSpec(num=1))
    embedding, head = (next(iter(stage.units[i][1] for stage in engine.pipeline.model.stages.values())) for i in (0, 2))
    with torch.no_grad():
        x = outer(by_hand, Sequences.from_lengths(LENGTHS), given["mask"], given["types"], embedding(given["tokens"]))
        torch.testing.assert_close(logits, head(x))
    assert engine.train_batch(given).success
    engine.close()


@pytest.mark.shows(103)
def test_a_compiled_layer_gets_what_it_asks_for() -> None:
    given = batch("mask")
    first, masked, head = nn.Embedding(VOCAB, WIDTH), Masked(), nn.Linear(WIDTH, VOCAB)
    engine = Engine.from_layers([first, torch.compile(masked, backend="eager"), head], WIDTH)  # pyright: ignore
    logits = engine.forward(given, micro_batches=MicroBatchSpec(num=1))
    with torch.no_grad():
        torch.testing.assert_close(logits, head(masked(first(given["tokens"]), given["mask"])))
    engine.close()


@pytest.mark.shows(103)
@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Wrapper(Masked()), r"layers.1, given the stream and \[\]: Masked.forward\(\) missing .* 'mask'"),
        (Masked, r"layers.1 takes 'mask', which has no default and is no key"),
    ],
)
def test_a_key_that_is_missing_inside_is_named_with_the_layer(make: Callable[[], nn.Module], words: str) -> None:
    engine = engine_of(make())
    with pytest.raises((ValueError, RuntimeError), match=words):
        engine.train_batch(batch())
    engine.close()
