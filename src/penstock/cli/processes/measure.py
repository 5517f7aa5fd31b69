"""The test of links, and the ranks of a pipeline over several hosts, measured for a cut by what each can do."""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.processes.machine import memory_bytes
from penstock.cli.processes.meeting import Group, exchange
from penstock.cli.processes.session import choose_device, initialise
from penstock.parallel import connect
from penstock.runtime import PipelineError
from penstock.settings import Device, Layout, ParallelConfig

# ---- The test of links: a word and a block go round a ring of all processes, and every group of a layout is made


_NUM_LINK_WORDS = 20
_LINK_BLOCK_BYTES = 4 * 2**20


def measure_links(layout: Layout, group: Group, store: Store, parallel: ParallelConfig) -> dict[str, Any]:
    """Test all links as one process of `group`; returns what was measured, by name.

    hosts: the machine of each rank. word_s: median step of a ring of all processes with eight bytes. block_bytes_per_s:
    bytes that each rank sends per second in a step with a large block. connect_s: time to make and use all groups.

    Raises: PipelineError naming a link that failed.
    """
    hosts = [theirs["host"] for theirs in exchange(store, group, "hosts", {"host": platform.node()})]
    parallel = choose_device(store, group, parallel)
    initialise(store, group, parallel)
    device = _device(parallel.device)
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


def _device(name: Device) -> torch.device:
    """The device of this process, once `choose_device` has chosen."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


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


# Long enough that a clock which rises and falls with the load has settled.
_SECONDS = 0.4
_WIDTH, _NUM_ROWS = 4096, 8


def _best_s(work: Callable[[], Tensor], device: torch.device) -> float:
    """The median seconds of the quicker half of some tries."""
    found, end = list[float](), time.perf_counter() + _SECONDS
    while len(found) < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return median(sorted(found)[: (len(found) + 1) // 2])


def measured_ranks(
    store: Store, group: Group, num_stages: int, device: Device
) -> tuple[Sequence[float], Sequence[float]]:
    """The bytes of weights that each rank reads in a second for a few rows, and its room for weights and caches.

    All ranks are measured at the same time; none where the stages are on one host, or are shared. The first rank says
    on standard error what was found.
    """
    if group.is_on_one_host or num_stages != group.world_size:
        return (), ()
    exchange(store, group, "measuring", {})
    place = _device(device)
    weight = torch.randn(_WIDTH, _WIDTH, device=place)
    rows = torch.randn(_NUM_ROWS, _WIDTH, device=place)
    seconds = _best_s(lambda: torch.nn.functional.linear(rows, weight), place)
    if device == "cuda":
        room = torch.cuda.mem_get_info(place)[0]
    else:
        room = memory_bytes() / (group.num_local or 1)
    own = {"bytes_per_s": weight.numel() * weight.element_size() / seconds, "room_bytes": room}
    ranks = exchange(store, group, "measured", own)
    speeds = [theirs["bytes_per_s"] for theirs in ranks]
    if group.rank == 0:
        found = ", ".join(f"{speed / 1e9:.1f}" for speed in speeds)
        print(
            f"penstock: the ranks read {found} GB of weights a second; each stage gets as much as its rank can do and "
            "hold",
            file=sys.stderr,
        )
    return speeds, [theirs["room_bytes"] for theirs in ranks]
