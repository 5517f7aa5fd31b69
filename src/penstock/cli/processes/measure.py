"""The ranks of a pipeline over several hosts, measured for a cut by what each of them can do and hold."""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from penstock.planner.cluster import DeviceLink
from penstock.runtime import PipelineError
from penstock.settings import Device, Layout, ParallelConfig

# ---- The test of links: a word and a block go round a ring of all processes, and every group of a layout is made


_NUM_LINK_WORDS = 20
_LINK_BLOCK_BYTES = 4 * 2**20


def measure_links(layout: Layout, group: Group, store: Store, parallel: ParallelConfig) -> dict[str, Any]:
    """Test all links as one process of `group`; returns what was measured, by name.

    hosts: the machine of each rank. word_s: median step of a ring of all processes with eight bytes. block_bytes_per_s:
    bytes that each rank sends per second in a step with a large block. connect_s: time to make and use all groups.
    cluster: the place of what `measure_cluster` gives.

    Raises: PipelineError naming a link that failed.
    """
    hosts = [theirs["host"] for theirs in exchange(store, group, "hosts", {"host": platform.node()})]
    parallel = choose_device(store, group, parallel)
    initialise(store, group, parallel)
    device = measured_device(parallel.device)
    ring = range(group.world_size)
    times = [ring_step(ring, torch.full((1,), group.rank, device=device)) for _ in range(_NUM_LINK_WORDS)]
    block = torch.full((_LINK_BLOCK_BYTES // 8,), group.rank, device=device)
    block_s = min(ring_step(ring, block) for _ in range(3))
    start = time.perf_counter()
    connect(layout, parallel.device, timedelta(seconds=parallel.timeout_s))
    connect_s = time.perf_counter() - start
    return {
        "device": parallel.device,
        "hosts": hosts,
        "word_s": sorted(times)[len(times) // 2],
        "block_bytes_per_s": _LINK_BLOCK_BYTES / block_s,
        "connect_s": connect_s,
        "cluster": None,
    }


def measured_device(name: Device) -> torch.device:
    """The device of this process, once `choose_device` has chosen."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def ring_step(members: Sequence[int], sent: Tensor) -> float:
    """Send this process's rank to the next of some in a ring, and check that the previous one's arrives.

    Returns the seconds. Raises: PipelineError naming the link that failed.
    """
    rank, size = dist.get_rank(), len(members)
    place = members.index(rank)
    before, after = members[(place - 1) % size], members[(place + 1) % size]
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


# ---- The machines of a group of processes, measured: products, memory and links, as a cluster's description


# Long enough that a clock which rises and falls with the load has settled.
_SECONDS = 0.4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDTHS, _COPY_BYTES = {"cpu": 1024, "cuda": 8192}, {"cpu": 2**27, "cuda": 2**30}
_NUM_WORDS, _NUM_BLOCKS, _BLOCK_BYTES = 50, 5, 8 * 2**20


def measure_cluster(group: Group, store: Store, hosts: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Measure all machines together, as one process of `group`; returns a cluster's table, the same for all.

    hosts: the machine of each rank. The slowest figures of any rank count, since a pipeline waits for them.
    """
    own = hosts[group.rank]
    here = [rank for rank, host in enumerate(hosts) if host == own]
    place = here.index(group.rank)
    members = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    dist.barrier()
    speed = _speed(device, len(here))
    across = [ranks[place] for ranks in members if place < len(ranks)]
    rings = {"near": here, "alone": across if place == 0 else [group.rank], "together": across}
    links = {name: _link(ring, device) for name, ring in rings.items()}
    known = {name: [link.bandwidth, link.latency_s] for name, link in links.items() if link is not None}
    found = exchange(store, group, "speeds", speed | known)
    return _description(found, len(members), max(map(len, members)))


def _speed(device: torch.device, num_processes: int) -> dict[str, Any]:
    """The speed of this process's device while all others are as busy: operations and bytes in a second."""
    width, kind = _WIDTHS[device.type], device.type
    peaks = {}
    for name, dtype in _DTYPES.items():
        if name == "fp16" and kind == "cpu":
            continue
        factors = [torch.randn(width, width, device=device).to(dtype) for _ in range(2)]
        out = torch.empty(width, width, device=device, dtype=dtype)
        seconds = best_s(lambda factors=factors, out=out: torch.mm(*factors, out=out), device)
        peaks[name] = 2.0 * width**3 / seconds
    source = torch.zeros(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_s = best_s(lambda: target.copy_(source), device)
    if kind == "cuda":
        memory = float(torch.cuda.mem_get_info(device)[1])
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_processes
    return {"peaks": peaks, "bandwidth": 2.0 * source.numel() / copied_s, "memory": memory}


def best_s(work: Callable[[], Tensor], device: torch.device) -> float:
    """The median seconds of the quicker half of some tries."""
    found, end = list[float](), time.perf_counter() + _SECONDS
    while len(found) < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return median(sorted(found)[: (len(found) + 1) // 2])


def _link(members: Sequence[int], device: torch.device) -> DeviceLink | None:
    """A ring of some processes, measured by one of them; the others may be in rings of their own, or wait."""
    found = None
    if len(members) > 1:
        word = torch.full((1,), dist.get_rank(), device=device)
        words = [ring_step(members, word) for _ in range(_NUM_WORDS)]
        block = torch.full((_BLOCK_BYTES // 8,), dist.get_rank(), device=device)
        blocks = [ring_step(members, block) for _ in range(_NUM_BLOCKS)]
        found = DeviceLink(_BLOCK_BYTES / min(blocks), median(words))
    dist.barrier()
    return found


def _description(found: Sequence[dict[str, Any]], num_hosts: int, devices_per_host: int) -> dict[str, Any]:
    """The cluster's table, as `penstock plan --cluster` reads it."""

    def least(name: str) -> DeviceLink | None:
        rows = [row[name] for row in found if name in row]
        return DeviceLink(min(row[0] for row in rows), max(row[1] for row in rows)) if rows else None

    near, alone, together = least("near"), least("alone"), least("together")
    between = alone or near
    inside = near or alone
    assert between is not None and inside is not None, "a group of several processes has a link"
    # Rings beside each other share the adapter as far as each is slower than one alone.
    shared_by = max(1, min(devices_per_host, round(alone.bandwidth / together.bandwidth))) if alone and together else 1
    between = replace(between, shared_by=shared_by)
    missing = "" if alone else "; one host: its network was not measured, and stands as the link within it"
    return {
        "num_devices": num_hosts * devices_per_host,
        "devices_per_host": devices_per_host,
        "source": f"measured by penstock doctor on {time.strftime('%Y-%m-%d')}{missing}",
        "device": {
            "memory_gib": _round(min(row["memory"] for row in found) / 2**30),
            "memory_bandwidth_gb_s": _round(min(row["bandwidth"] for row in found) / 1e9),
            "peak_tflops": {
                name: _round(min(row["peaks"][name] for row in found) / 1e12) for name in found[0]["peaks"]
            },
        },
        "host": _link_table(inside),
        "network": _link_table(between),
    }


def _link_table(link: DeviceLink) -> dict[str, float | int]:
    return {
        "bandwidth_gb_s": _round(link.bandwidth / 1e9),
        "latency_us": _round(link.latency_s * 1e6),
        "shared_by": link.shared_by,
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# ---- The ranks of a pipeline over several hosts, measured for a cut by what each of them can do and hold


_WIDTH, _NUM_ROWS = 4096, 8


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
    place = measured_device(device)
    weight = torch.randn(_WIDTH, _WIDTH, device=place)
    rows = torch.randn(_NUM_ROWS, _WIDTH, device=place)
    seconds = best_s(lambda: torch.nn.functional.linear(rows, weight), place)
    if device == "cuda":
        room = torch.cuda.mem_get_info(place)[0]
    else:
        room = (memory_bytes("cpu") or 0) / (group.num_local or 1)
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
