"""The in-process transport and the one over torch.distributed carry a program to the same bits."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import schedule
from penstock.model import Sequences, WeightGradients, defer, switch_linears
from penstock.runtime import (
    Boundary,
    DistributedTransport,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Recorder,
    Stage,
    Transport,
    run_together,
)
from tests.dist.launch import run_ranks

HIDDEN, LENGTHS = 6, (3, 5, 2, 4)
Result = tuple[list[Tensor], list[Tensor]]


class OneRank:
    """One rank's stages with weights that depend on the stage's number alone."""

    def __init__(self, name: str, ranks: int, rank: int, transport: Transport) -> None:
        program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=len(LENGTHS)))
        self.layers: list[nn.Module] = []
        stages = {}
        for number in program.placement.stages_of(rank):
            torch.manual_seed(number)
            layer, owner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()), WeightGradients()
            switch_linears(layer)
            defer(layer, owner)
            self.layers.append(layer)
            stages[number] = Stage(number, [("layer", layer)], Boundary(HIDDEN, torch.float32), owner)
        self.executor = Executor(program, stages, transport, Recorder(rank))

    @staticmethod
    def feeds() -> list[Feed]:
        torch.manual_seed(99)
        return [Feed(n, Sequences.from_lengths([n]), torch.randn(n, HIDDEN), torch.sum) for n in LENGTHS]

    def result(self, losses: list[Tensor]) -> Result:
        gradients = [p.grad for layer in self.layers for p in layer.parameters()]
        return losses, [g.clone() for g in gradients if g is not None]


def over_gloo(rank: int, name: str, ranks: int) -> Result:
    group = dist.group.WORLD
    assert group is not None
    placement = schedule.build(name, ranks=ranks, microbatches=len(LENGTHS)).placement
    transport = DistributedTransport(placement, group, torch.device("cpu"), 20.0)
    one = OneRank(name, ranks, rank, transport)
    return one.result(one.executor.run(one.feeds()))


def in_process(name: str, ranks: int) -> list[Result]:
    hub = InProcessHub()
    every = [OneRank(name, ranks, rank, InProcessTransport(hub, rank)) for rank in range(ranks)]
    losses = run_together([one.executor for one in every], [OneRank.feeds()] * ranks)
    return [one.result(found) for one, found in zip(every, losses, strict=True)]


@pytest.mark.shows(11)
@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 2), ("1f1b", 3), ("interleaved", 3), ("zb-v", 2), ("afab", 5)])
def test_both_transports_give_the_same_bits(name: str, ranks: int) -> None:
    num_losses = 0
    for real, emulated in zip(run_ranks(ranks, over_gloo, name, ranks), in_process(name, ranks), strict=True):
        assert len(real[1]) == len(emulated[1]) > 0
        assert all(torch.equal(a, b) for a, b in zip(real[0] + real[1], emulated[0] + emulated[1], strict=True))
        num_losses += len(real[0])
    assert num_losses == len(LENGTHS)
