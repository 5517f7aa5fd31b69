"""Ranks that share one thread: each goes on as far as its messages allow, then the next one."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.model import Driven
from penstock.runtime.errors import Deadlock
from penstock.runtime.transport import Receipt

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Participant(Generic[T]):
    """One rank's work."""

    #: yields the receipts that it cannot take yet, and returns the rank's result
    steps: Generator[Receipt, None, T]
    #: one sentence on the action that the rank is in
    where: Callable[[], str]
    #: torch's gradient mode while this rank works
    mode: Callable[[], AbstractContextManager[object]]


def run_in_turn(ranks: Mapping[int, Participant[T]]) -> dict[int, T]:
    """Run all ranks and return their results. If one fails, the others cannot finish either, and are closed.

    Raises:
        Deadlock: no rank can go on; the message says for each what it waits for.
    """
    running, awaited, results = dict(ranks), dict[int, Receipt](), dict[int, T]()
    driven = {rank: Driven(one.steps, one.mode) for rank, one in ranks.items()}
    try:
        while running:
            able = [rank for rank in running if rank not in awaited or awaited[rank].ready()]
            if not able:
                stuck = "; ".join(one.where() for one in running.values())
                raise Deadlock(f"no rank can go on: {stuck}")
            for rank in able:
                receipt = next(driven[rank], None)
                if receipt is not None:
                    awaited[rank] = receipt
                else:
                    results[rank] = driven[rank].result
                    del running[rank]
    finally:
        for one in running.values():
            one.steps.close()
    return results
