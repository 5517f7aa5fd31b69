"""The ranks that a check runs in one process: what they send each other, and the random numbers of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.check.ranks_in_turn import LinkInTurn, RanksInTurn
from penstock.parallel import Grid
from penstock.parallel.host import gather_json
from penstock.runtime.message import Message
from penstock.schedule import Channel, Direction
from penstock.settings import Layout

WORLD = 3


def of_each_rank(work: Callable[[int, Grid], object], ranks: RanksInTurn | None = None) -> list[object]:
    """What each rank's work gives."""
    ranks = ranks or RanksInTurn(Layout(pp=WORLD), torch.device("cpu"))
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        results[rank] = work(rank, ranks.grid(rank))

    ranks.turns.run(run)
    return [results[rank] for rank in range(WORLD)]


@pytest.mark.shows(196)
def test_a_collective_gives_every_rank_what_torch_distributed_would() -> None:
    values = torch.tensor([[1.5, -4.0], [0.25, 7.0], [-2.0, 0.5]])

    def work(rank: int, grid: Grid) -> dict[str, list[float]]:
        assert grid.control is not None
        given: dict[str, Tensor] = {name: values[rank].clone() for name in ("sum", "max", "broadcast")}
        dist.all_reduce(given["sum"], group=grid.control)
        dist.all_reduce(given["max"], dist.ReduceOp.MAX, group=grid.control)
        dist.broadcast(given["broadcast"], group=grid.control, group_src=1)
        return {name: value.tolist() for name, value in given.items()}

    expected = {"sum": [-0.25, 3.5], "max": [1.5, 7.0], "broadcast": [0.25, 7.0]}
    assert of_each_rank(work) == [expected] * WORLD
    assert of_each_rank(lambda rank, grid: gather_json(rank, grid.control)) == [[0, 1, 2]] * WORLD


@pytest.mark.shows(196)
def test_a_message_has_memory_of_its_own() -> None:
    """A layer that changes what it has sent, or what has come, changes nothing on the other rank."""
    ranks, sent = RanksInTurn(Layout(pp=WORLD), torch.device("cpu")), torch.zeros(4, 8)
    channel = Channel(0, 2, Direction.FORWARD)

    def work(rank: int, grid: Grid) -> Tensor | None:
        link = LinkInTurn(ranks.hub, rank, ranks.turns)
        if rank == 2:
            return link.receive(channel, Message((sent,)).header).wait().value.add_(1)
        if rank == 0:
            link.send(channel, Message((sent,)))
            sent.add_(5)
        return None

    received = of_each_rank(work, ranks)[2]
    assert isinstance(received, Tensor)
    assert received.unique().tolist() == [1.0]
    assert sent.unique().tolist() == [5.0]


@pytest.mark.shows(196)
def test_each_rank_has_the_random_numbers_of_a_process_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    alone = [torch.rand(()).item() for _ in range(4)]
    torch.set_rng_state(state)

    def work(rank: int, grid: Grid) -> list[float]:
        drawn = []
        for _ in range(4):
            drawn.append(torch.rand(()).item())
            gather_json(rank, grid.control)
        return drawn

    assert of_each_rank(work) == [alone] * WORLD
    assert torch.equal(torch.get_rng_state(), state)
