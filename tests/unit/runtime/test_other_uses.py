"""A weight that something else reads beside its linear layer: sums have autograd's order, whatever is deferred."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import schedule
from penstock.model import Sequences, WeightGradients, defer, switch_linears
from penstock.runtime import (
    Boundary,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Recorder,
    Stage,
    run_together,
)

WIDTH, LENGTHS = 16, (5, 3, 7, 4)


class Layer(nn.Module):
    """Two linear layers, of which the first, or its bias, is read besides."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.use(self.up, x)))


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "the weight": lambda up, x: up(x) @ up.weight,
    "the weight, through others": lambda up, x: up(x) * (up.weight.square().sum() + 1).log(),
    "the bias": lambda up, x: up(x) + 2 * up.bias,
    "called twice": lambda up, x: up(F.relu(up(x))),
    "no other": lambda up, x: up(x),
}


def layers_of(name: str) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(USES[name]) for _ in range(2)]


def loss_of(h: Tensor) -> Tensor:
    return h.square().sum()


@pytest.mark.shows(11, 20)
@pytest.mark.parametrize("order", ["zb-h1", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", USES)
def test_sums_have_the_order_of_a_plain_loop(name: str, recompute: bool, order: str) -> None:
    inputs = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    plain = layers_of(name)
    built = schedule.build(order, ranks=2, microbatches=len(LENGTHS))
    program = schedule.lower(schedule.early_gradients(built) if order == "1f1b" else built)
    hub, executors, staged, owners = InProcessHub(), list[Executor](), layers_of(name), list[WeightGradients]()
    for number, layer in enumerate(staged):
        owners.append(owner := WeightGradients())
        switch_linears(layer)
        defer(layer, owner)
        names = ["layer"] if recompute else []
        stage = Stage(number, [("layer", layer)], Boundary(WIDTH, torch.float32), owner, recompute=names)
        executors.append(Executor(program, {number: stage}, InProcessTransport(hub, number), Recorder(number)))
    feeds = [Feed(len(x), Sequences.from_lengths([len(x)]), x, loss_of) for x in inputs]
    for _ in range(2):
        for x in inputs:
            loss_of(plain[1](plain[0](x))).backward()
        run_together(executors, [feeds] * 2)
        for ours, theirs in zip(staged, plain, strict=True):
            for key, parameter in theirs.named_parameters():
                assert torch.equal(ours.get_parameter(key).grad, parameter.grad), key  # pyright: ignore
    # What has no other use is deferred as before.
    known = owners[1].read_elsewhere
    assert known is not None and known.isdisjoint(staged[1].down.parameters())
    assert known.isdisjoint(staged[1].up.parameters()) is not name.startswith("the")
    assert known <= {*staged[1].parameters()}, "activations stay"
