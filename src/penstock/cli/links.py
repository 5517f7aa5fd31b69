"""The test of links: a word and a block go round a ring of all processes, and every group of a layout is made."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.group import Group, agree
from penstock.cli.together import choose_device, initialise
from penstock.parallel import connect
from penstock.runtime import PipelineError
from penstock.settings import Layout

_NUM_WORDS = 20
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Links:
    """Measurements of a ring of all processes, and of making the layout's groups.

    hosts: the machine of each rank. word_s: median step of the ring with eight bytes. block_bytes_per_s: bytes that
    each rank sends per second in a step with a large block. connect_s: time to make and use all groups.
    """

    device: str
    hosts: tuple[str, ...]
    word_s: float
    block_bytes_per_s: float
    connect_s: float
    #: the machines as a cluster's table, if they were to be measured
    cluster: dict[str, Any] | None = None


def measure_links(layout: Layout, group: Group, store: Store, wanted_device: str, timeout_s: float) -> Links:
    """Test all links as one process of `group`.

    Raises: PipelineError naming a link that failed.
    """
    hosts = [theirs["host"] for theirs in agree(store, group, "hosts", {"host": platform.node()})]
    device_name = choose_device(store, group, wanted_device)
    initialise(store, group, device_name, timeout_s)
    device = device_of(device_name, group)
    ring = ProcessRing(range(group.world_size), group.rank, device)
    times = [ring.step(torch.full((1,), group.rank, device=device)) for _ in range(_NUM_WORDS)]
    block = torch.full((_BLOCK_BYTES // 8,), group.rank, device=device)
    block_s = min(ring.step(block) for _ in range(3))
    start = time.perf_counter()
    connect(layout, device, timedelta(seconds=timeout_s))
    connect_s = time.perf_counter() - start
    word_s = sorted(times)[len(times) // 2]
    return Links(device_name, tuple(hosts), word_s, _BLOCK_BYTES / block_s, connect_s)


def device_of(name: str, group: Group) -> torch.device:
    """The device of this process."""
    return torch.device(name, group.local_rank) if name == "cuda" else torch.device("cpu")


@dataclass(frozen=True)
class ProcessRing:
    """Some processes in a ring, of which this one, `rank`, is one; each sends to the next."""

    members: Sequence[int]
    rank: int
    device: torch.device

    def step(self, sent: Tensor) -> float:
        """Send to the next process and check that the previous one's rank arrives. Returns the seconds.

        Raises: PipelineError naming the link that failed.
        """
        rank, place, size = self.rank, self.members.index(self.rank), len(self.members)
        before, after = self.members[(place - 1) % size], self.members[(place + 1) % size]
        arrived = torch.full_like(sent, -1)
        start = time.perf_counter()
        try:
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, arrived, before)]
            )
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PipelineError(
                f"the link from process {before} to {rank}, or from {rank} to {after}, carried nothing in "
                f"{time.perf_counter() - start:.1f} s ({str(error).splitlines()[0]})"
            ) from error
        if not bool((arrived == before).all()):
            raise PipelineError(f"the link from process {before} to {rank} carried something else than was sent")
        return time.perf_counter() - start
