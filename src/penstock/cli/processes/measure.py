"""The test of links: a word and a block go round a ring of all processes, and every group of a layout is made."""

import platform
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.cli.processes.session import Meeting, initialise
from penstock.parallel import connect
from penstock.runtime import PipelineError
from penstock.settings import Layout, ParallelConfig

_NUM_LINK_WORDS = 20
_LINK_BLOCK_BYTES = 4 * 2**20


def measure_links(layout: Layout, meeting: Meeting, parallel: ParallelConfig) -> dict[str, Any]:
    """Test all links as one process of a group; returns what was measured, by name.

    hosts: the machine of each rank. word_s: median step of a ring of all processes with eight bytes. block_bytes_per_s:
    bytes that each rank sends per second in a step with a large block. connect_s: time to make and use all groups.

    Raises: PipelineError naming a link that failed.
    """
    hosts = meeting.exchange("hosts", platform.node())
    parallel, group = meeting.choose_device(parallel), meeting.group
    initialise(meeting.store, group, parallel)
    device = torch.device("cuda", torch.cuda.current_device()) if parallel.device == "cuda" else torch.device("cpu")
    times = [_ring_step(torch.full((1,), group.rank, device=device)) for _ in range(_NUM_LINK_WORDS)]
    block = torch.full((_LINK_BLOCK_BYTES // 8,), group.rank, device=device)
    block_s = min(_ring_step(block) for _ in range(3))
    start = time.perf_counter()
    connect(layout, parallel.device, timedelta(seconds=parallel.timeout_s))
    connect_s = time.perf_counter() - start
    return {
        "device": parallel.device,
        "hosts": hosts,
        "word_s": median(times),
        "block_bytes_per_s": _LINK_BLOCK_BYTES / block_s,
        "connect_s": connect_s,
    }


def _ring_step(sent: Tensor) -> float:
    """Send this process's rank to the next in a ring of all, and check that the previous one's arrives.

    Returns the seconds. Raises: PipelineError naming the link that failed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    arrived = torch.full_like(sent, -1)
    start = time.perf_counter()
    try:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, arrived, before)])
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
