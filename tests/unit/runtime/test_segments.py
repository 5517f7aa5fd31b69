"""Rows of segments: undone bit for bit like one autograd graph, plain, zipped, split and recomputed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from penstock.model import (
    Compute,
    Exchange,
    Linear,
    Segment,
    SegmentedUnit,
    Sequences,
    WeightGradients,
    defer,
    drain,
    zip_lanes,
)
from penstock.runtime import Boundary, Message, Stage, Tape

SEQUENCES = Sequences.from_lengths([3, 2])
WIDTH = 8


@dataclass
class Turned:
    x: Tensor

    def wait(self) -> Tensor:
        return self.x


class Mixer(SegmentedUnit):
    """x + second(turn(first(x))), where the turn is an exchange of a row with its opposite."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.first, self.second, self.log = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH), log

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        def turn(x: Tensor) -> Turned:
            self.log.append("launch")
            return Turned(x.flip(0))

        return [
            Compute("first", lambda x: (self.first(x), x)),
            Exchange("turn", turn, turn),
            Compute("second", lambda h, x: (x + self.second(h).sin(),)),
        ]

    def reference(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).flip(0)).sin()


def make(seed: int, recompute: bool = False) -> tuple[Stage, list[Mixer], WeightGradients]:
    torch.manual_seed(seed)
    owner = WeightGradients()
    units = [Mixer([]) for _ in range(3)]
    for unit in units:
        for weight in unit.parameters():
            nn.init.normal_(weight, std=0.3)
        defer(unit, owner)
    named = [(f"mixer.{i}", unit) for i, unit in enumerate(units)]
    recomputed = [name for name, _ in named] if recompute else []
    return Stage(0, named, Boundary(WIDTH, torch.float32), owner, recompute=recomputed), units, owner


def expected(seed: int, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    _, units, _ = make(seed)
    leaf = h = x.clone().requires_grad_()
    for unit in units:
        h = unit.reference(h)
    h.backward(grad)
    assert leaf.grad is not None
    return h.detach(), leaf.grad, [p.grad for u in units for p in u.parameters() if p.grad is not None]


@pytest.mark.parametrize(("split", "recompute", "zipped"), list(itertools.product([False, True], repeat=3)))
def test_a_row_gives_what_one_graph_gives(split: bool, recompute: bool, zipped: bool) -> None:
    x, grad = torch.randn(2, 5, WIDTH)
    stage, units, _ = make(1, recompute)
    tape, other = Tape(), Tape()
    output = drain(stage.forward(tape, Message((x,)), SEQUENCES))
    backward = stage.backward(tape, Message((grad,)), split)
    if zipped:
        input_grad, beside = zip_lanes(backward, stage.forward(other, Message((grad,)), SEQUENCES))
        assert torch.equal(beside.tensors[0], expected(1, grad, x)[0])
    else:
        input_grad = drain(backward)
    if split:
        assert tape.weight_gradients
    stage.weight_backward(tape)
    wanted_output, wanted_grad, wanted_grads = expected(1, x, grad)
    assert torch.equal(output.tensors[0], wanted_output)
    assert torch.equal(input_grad.tensors[0], wanted_grad)
    found = [p.grad for u in units for p in u.parameters() if p.grad is not None]
    assert len(found) == len(wanted_grads) == 6
    assert all(map(torch.equal, found, wanted_grads))
    assert not tape.segments
    assert not tape.weight_gradients


def test_a_split_backward_leaves_the_gradient_of_a_plain_layers_weight_for_later() -> None:
    owner, layer = WeightGradients(), Linear(WIDTH, WIDTH)
    nn.init.normal_(layer.weight)
    defer(layer, owner)
    stage, tape = Stage(0, [("layer", layer)], Boundary(WIDTH, torch.float32), owner), Tape()
    x, grad = torch.randn(2, 5, WIDTH)
    drain(stage.forward(tape, Message((x,)), SEQUENCES))
    drain(stage.backward(tape, Message((grad,)), split=True))
    assert layer.weight.grad is None
    stage.weight_backward(tape)
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, grad.t() @ x)


def test_lanes_are_suspended_after_each_launch() -> None:
    stage, units, _ = make(2)
    tape = Tape()
    x = torch.randn(5, WIDTH)
    assert sum(1 for _ in stage.forward(tape, Message((x,)), SEQUENCES)) == len(units)
    assert sum(1 for _ in stage.backward(tape, Message((x,)))) == len(units)
    assert [unit.log for unit in units] == [["launch", "launch"]] * len(units)


def test_without_a_tape_nothing_is_kept() -> None:
    stage, units, _ = make(3)
    x = torch.randn(5, WIDTH)
    [output] = drain(stage.forward(None, Message((x,)), SEQUENCES)).tensors
    assert not output.requires_grad
    h = x
    with torch.no_grad():
        for unit in units:
            h = unit(h, SEQUENCES)
    assert torch.equal(output, h)
