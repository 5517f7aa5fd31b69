"""What a user does with the values of parameters and buffers: other memory, other forms, and marks of torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, MicroBatchSpec, PackedBatch, PipelineError

WIDTH = 8
SGD = partial(torch.optim.SGD, lr=0.1)
BATCH = PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 6, 4)])


def engine_of(*middle: Callable[[], nn.Module], optimizer: Any = SGD) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, WIDTH), *(make() for make in middle), nn.Linear(WIDTH, 16)]
    return Engine.from_layers(layers, WIDTH, device="cpu", optimizer=optimizer)


def steps(engine: Engine) -> list[float]:
    return [engine.train_batch(BATCH, micro_batches=MicroBatchSpec(num=2)).loss for _ in range(2)]


class Rebinds(nn.Linear):
    """Gives its bias another value in forward, by other memory."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, input: Tensor) -> Tensor:
        self.bias.data = self.change(self.bias.data)
        return nn.functional.linear(input, self.weight, self.bias.to(input.dtype))


def test_a_parameter_may_be_given_other_memory_in_a_forward_and_between_steps() -> None:
    written, rebound = map(
        engine_of, (partial(Rebinds, lambda own: own.mul_(0.9)), partial(Rebinds, lambda own: own * 0.9))
    )
    for _ in range(2):
        assert steps(rebound) == steps(written)
        for engine, weight in ((each, each.parameters()["layers.1.weight"]) for each in (written, rebound)):
            weight.data = weight.data * 0.5 if engine is rebound else weight.data.mul_(0.5)


def test_a_tied_weight_that_is_given_other_memory_is_refused_until_it_is_one_again() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    engine = engine_of(lambda: first, lambda: second)
    owner, copy_of_it = (engine.parameters()[f"layers.{number}.weight"] for number in (1, 2))
    memory = owner.data
    owner.data = 0.9 * memory
    words = r"layers\.2\.weight is tied to layers\.1\.weight, but one of them was given other memory"
    with pytest.raises(PipelineError, match=words):
        steps(engine)
    owner.data = memory
    steps(engine)
    assert torch.equal(owner, copy_of_it)
