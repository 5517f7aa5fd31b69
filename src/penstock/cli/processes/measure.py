"""The test of links: every group of a layout is made and used, and a word and a block go round a ring of all ranks."""

import platform
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch

from penstock.cli.processes.session import Meeting, initialise
from penstock.parallel import connect
from penstock.runtime import DistributedTransport, Message
from penstock.schedule import Channel, Direction
from penstock.settings import Layout, ParallelConfig

_NUM_LINK_WORDS = 20
_LINK_BLOCK_BYTES = 4 * 2**20


def measure_links(layout: Layout, meeting: Meeting, parallel: ParallelConfig) -> dict[str, Any]:
    """Test all links as one process of a group, by the engine's own transport; returns what was measured, by name.

    hosts: the machine of each rank. word_s: median step of a ring of all processes with eight bytes. block_bytes_per_s:
    bytes that each rank sends per second in a step with a large block. connect_s: time to make and use all groups and
    links.

    Raises: PipelineError naming a link that failed.
    """
    hosts = meeting.exchange("hosts", platform.node())
    parallel, rank, size = meeting.choose_device(parallel), meeting.group.rank, layout.world_size
    initialise(meeting.store, meeting.group, parallel)
    start = time.perf_counter()
    grid = connect(layout, parallel.device, timedelta(seconds=parallel.timeout_s))
    assert grid.control is not None, "there are several processes"
    ring = [Channel(source, (source + 1) % size, Direction.FORWARD) for source in range(size)]
    transport = DistributedTransport(ring, grid.control, grid.device, parallel.timeout_s)
    connect_s = time.perf_counter() - start

    def step_s(num_bytes: int) -> float:
        sent = Message((torch.zeros(num_bytes, dtype=torch.uint8, device=grid.device),))
        start = time.perf_counter()
        arriving = transport.receive(ring[rank - 1], sent.header)
        transport.send(ring[rank], sent)
        arriving.wait()
        return time.perf_counter() - start

    return {
        "device": parallel.device,
        "hosts": hosts,
        "word_s": median(step_s(8) for _ in range(_NUM_LINK_WORDS)),
        "block_bytes_per_s": _LINK_BLOCK_BYTES / min(step_s(_LINK_BLOCK_BYTES) for _ in range(3)),
        "connect_s": connect_s,
    }
