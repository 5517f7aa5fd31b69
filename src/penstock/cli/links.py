"""The test of links: a word and a block go round a ring of all processes, and every group of a layout is made."""

import platform
import time
from dataclasses import dataclass
from datetime import timedelta

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


def measure_links(layout: Layout, group: Group, store: Store, wanted_device: str, timeout_s: float) -> Links:
    """Test all links as one process of `group`.

    Raises: PipelineError naming a link that failed.
    """
    hosts = [theirs["host"] for theirs in agree(store, group, "hosts", {"host": platform.node()})]
    device_name = choose_device(store, group, wanted_device)
    initialise(store, group, device_name, timeout_s)
    device = torch.device(device_name, group.local_rank) if device_name == "cuda" else torch.device("cpu")
    ring = _RingOfProcesses(group, device)
    times = [ring.step(torch.full((1,), group.rank, device=device)) for _ in range(_NUM_WORDS)]
    block = torch.full((_BLOCK_BYTES // 8,), group.rank, device=device)
    block_s = min(ring.step(block) for _ in range(3))
    start = time.perf_counter()
    connect(layout, device, timedelta(seconds=timeout_s))
    connect_s = time.perf_counter() - start
    return Links(device_name, tuple(hosts), sorted(times)[len(times) // 2], _BLOCK_BYTES / block_s, connect_s)


@dataclass(frozen=True)
class _RingOfProcesses:
    """All processes in a ring; each sends to the next."""

    group: Group
    device: torch.device

    def step(self, sent: Tensor) -> float:
        """Send to the next process and check that the previous one's rank arrives. Returns the seconds.

        Raises: PipelineError naming the link that failed.
        """
        rank, world_size = self.group.rank, self.group.world_size
        before, after = (rank - 1) % world_size, (rank + 1) % world_size
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
