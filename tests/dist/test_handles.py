"""Over real processes each message's handle, of its send and of its receive, is waited for once and none is left."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import schedule
from penstock.runtime import DistributedTransport
from penstock.runtime import transport as module
from penstock.schedule import Op
from tests.dist.launch import run_ranks
from tests.dist.test_transports_agree import LENGTHS, OneRank

NAMES = ("afab", "1f1b", "interleaved", "zb-v", "combined-1f1b", "dualpipe")
STEPS = 2


class CountedWork:
    def __init__(self, work: dist.Work) -> None:
        self.work, self.num_waits = work, 0

    def wait(self) -> Any:
        self.num_waits += 1
        return self.work.wait()


class CountedGroup:
    """A communicator of two that keeps the works it gives, of sends and of receives."""

    def __init__(self, group: Any, works: dict[str, list[CountedWork]]) -> None:
        self.group, self.works = group, works

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> CountedWork:
        self.works["sent"].append(CountedWork(self.group.send(tensors, peer, tag)))
        return self.works["sent"][-1]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> CountedWork:
        self.works["received"].append(CountedWork(self.group.recv(tensors, peer, tag)))
        return self.works["received"][-1]


def count_works(rank: int, num_ranks: int) -> list[tuple[dict[str, list[int]], dict[str, int], int]]:
    """By schedule: how often each work was waited for, the messages of the program, and what was pending at the end."""
    group, make, found = dist.group.WORLD, module._backend_maker, []
    assert group is not None
    for number, name in enumerate(NAMES):
        # By turns a thread waits for every send, and the main thread for all of them at the end of a step.
        module._MOST_BATCH_BYTES = (0, 1 << 30)[number % 2]
        works: dict[str, list[CountedWork]] = {"sent": [], "received": []}

        def counted(*args: Any, works: Any = works) -> Any:
            backend = make(*args)
            return lambda store, place: CountedGroup(backend(store, place), works)

        module._backend_maker = counted
        program = schedule.lower(schedule.build(name, ranks=num_ranks, microbatches=len(LENGTHS)))
        transport = DistributedTransport(program.placement, group, torch.device("cpu"), 20.0)
        for links_tested in works.values():
            links_tested.clear()
        one, num_pending = OneRank(name, num_ranks, rank, transport), 0
        for _ in range(STEPS):
            one.executor.run(one.feeds())
            num_pending += transport.num_pending()
        ops = [step.op for step in program.ranks[rank] if not isinstance(step, schedule.Pair)]
        expected = {
            "sent": STEPS * sum(op in (Op.SEND_F, Op.SEND_B) for op in ops),
            "received": STEPS * sum(op in (Op.RECV_F, Op.RECV_B) for op in ops),
        }
        found.append(({kind: [work.num_waits for work in of] for kind, of in works.items()}, expected, num_pending))
        transport.close()
    module._backend_maker = make
    return found


@pytest.mark.shows(9)
def test_each_work_of_the_backend_is_waited_for_once_and_none_is_left_after_a_step() -> None:
    for found in run_ranks(3, count_works, 3):
        assert len(found) == len(NAMES)
        for waits, expected, num_pending in found:
            assert waits == {kind: [1] * number for kind, number in expected.items()}
            assert all(expected.values())
            assert num_pending == 0
