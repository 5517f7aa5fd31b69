"""Collectives as units launch them: what arrives where, and what an observer learns of it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.parallel.collectives import Collectives, Handle, observe
from penstock.schedule.recording import CollectiveKind
from tests.dist.launch import run_ranks

RANKS = 3
ROWS = [[1, 0, 2], [3, 1, 0], [0, 2, 2]]  # from which rank, to which


@dataclass
class Ledger:
    """Remembers what it was told; leaves works as they are."""

    launched: list[tuple[str, int]] = field(default_factory=list)

    def follow(
        self, kind: CollectiveKind, num_bytes: int, work: Handle[object], group: object = None
    ) -> Handle[object]:
        self.launched.append((str(kind), num_bytes))
        return work


class Holder(nn.Module):
    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self.collectives = collectives


def rows_of(rank: int, num_rows: int) -> Tensor:
    """Rows that tell where they come from."""
    return torch.arange(2.0 * num_rows).reshape(num_rows, 2) + 100 * rank


def everything(rank: int) -> tuple[dict[str, Tensor], list[tuple[str, int]]]:
    group = torch.distributed.group.WORLD
    collectives, ledger = Collectives(group), Ledger()
    assert (collectives.size, collectives.rank) == (RANKS, rank)
    assert observe(nn.Sequential(Holder(collectives), Holder(collectives)), ledger) == 1
    sent, received = ROWS[rank], [row[rank] for row in ROWS]
    # All are under way at once, and waited for in another order than launched.
    travelling = {
        "unequal": collectives.all_to_all(rows_of(rank, sum(sent)), sent, received),
        "equal": collectives.all_to_all(rows_of(rank, RANKS)),
        "gather": collectives.all_gather(rows_of(rank, 2)),
        "scatter": collectives.reduce_scatter(rows_of(rank, 2 * RANKS)),
        "reduce": collectives.all_reduce(rows_of(rank, 2)),
        "ring": collectives.send_receive(rows_of(rank, 2), (rank + 1) % RANKS, (rank - 1) % RANKS),
    }
    return {name: one.wait() for name, one in reversed(travelling.items())}, ledger.launched


def test_each_rank_gets_what_is_meant_for_it():
    by_rank = run_ranks(RANKS, everything, timeout_s=60.0)
    starts = [[sum(row[:to]) for to in range(RANKS)] for row in ROWS]
    summed = sum(rows_of(rank, 2 * RANKS) for rank in range(RANKS))
    assert isinstance(summed, Tensor)
    for rank, (found, launched) in enumerate(by_rank):
        parts = [
            rows_of(source, sum(ROWS[source]))[starts[source][rank] :][: ROWS[source][rank]] for source in range(RANKS)
        ]
        expected = {
            "unequal": torch.cat(parts),
            "equal": torch.stack([rows_of(source, RANKS)[rank] for source in range(RANKS)]),
            "gather": torch.cat([rows_of(source, 2) for source in range(RANKS)]),
            "scatter": summed[2 * rank : 2 * rank + 2],
            "reduce": sum(rows_of(source, 2) for source in range(RANKS)),
            "ring": rows_of((rank - 1) % RANKS, 2),
        }
        assert {name: value.tolist() for name, value in found.items()} == {
            name: torch.as_tensor(value).tolist() for name, value in expected.items()
        }
        kinds = ["all-to-all", "all-to-all", "all-gather", "reduce-scatter", "all-reduce", "send-receive"]
        row_bytes = 2 * 4
        rows = [sum(ROWS[rank]), RANKS, 2, 2 * RANKS, 2, 2]
        assert launched == [(kind, n * row_bytes) for kind, n in zip(kinds, rows, strict=True)]


def test_a_group_of_one_moves_nothing():
    alone, x = Collectives(None), torch.ones(3, 2)
    assert (alone.size, alone.rank) == (1, 0)
    for travelling in (alone.all_to_all(x), alone.all_gather(x), alone.reduce_scatter(x), alone.all_reduce(x)):
        assert travelling.wait() is x
    assert alone.send_receive(x, 0, 0).wait() is x
