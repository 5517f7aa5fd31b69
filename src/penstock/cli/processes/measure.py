"""The ranks of a pipeline over several hosts, measured for a cut by what each of them can do and hold."""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from penstock.engine.generation.decode_cut import DecodingRank
from penstock.parallel import connect
from penstock.runtime import PipelineError
from penstock.settings import Device, Layout

# ---- The test of links: a word and a block go round a ring of all processes, and every group of a layout is made


_NUM_LINK_WORDS = 20
_LINK_BLOCK_BYTES = 4 * 2**20


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
    hosts = [theirs["host"] for theirs in exchange(store, group, "hosts", {"host": platform.node()})]
    device_name = choose_device(store, group, wanted_device)
    initialise(store, group, device_name, timeout_s)
    device = measured_device(device_name, group)
    ring = ProcessRing(range(group.world_size), group.rank, device)
    times = [ring.step(torch.full((1,), group.rank, device=device)) for _ in range(_NUM_LINK_WORDS)]
    block = torch.full((_LINK_BLOCK_BYTES // 8,), group.rank, device=device)
    block_s = min(ring.step(block) for _ in range(3))
    start = time.perf_counter()
    connect(layout, device, timedelta(seconds=timeout_s))
    connect_s = time.perf_counter() - start
    word_s = sorted(times)[len(times) // 2]
    return Links(device_name, tuple(hosts), word_s, _LINK_BLOCK_BYTES / block_s, connect_s)


def measured_device(name: str, group: Group) -> torch.device:
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


# ---- The machines of a group of processes, measured: products, memory and links, as a cluster's description


# Long enough that a clock which rises and falls with the load has settled.
_SECONDS = 0.4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDTHS, _COPY_BYTES = {"cpu": 1024, "cuda": 8192}, {"cpu": 2**27, "cuda": 2**30}
_NUM_WORDS, _NUM_BLOCKS, _BLOCK_BYTES = 50, 5, 8 * 2**20


@dataclass(frozen=True)
class Speed:
    """The speed of one process's device while all others are as busy.

    peak_flops: of products by dtype, in operations a second. memory_bandwidth: bytes read and written a second.
    """

    peak_flops: dict[str, float]
    memory_bandwidth: float
    memory_bytes: float


@dataclass(frozen=True)
class LinkSpeed:
    """A link of one process: bytes a second each way while it is alone, seconds of a word, and who shares it."""

    bandwidth: float
    latency_s: float
    shared_by: int = 1


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
    near = _link(here, group.rank, device)
    across = [ranks[place] for ranks in members if place < len(ranks)]
    alone = _link(across if place == 0 else [group.rank], group.rank, device)
    together = _link(across, group.rank, device)
    found = exchange(store, group, "speeds", _as_table(speed, near, alone, together))
    return _description(found, len(members), max(map(len, members)))


def _speed(device: torch.device, num_processes: int) -> Speed:
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
    return Speed(peaks, 2.0 * source.numel() / copied_s, memory)


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


def _link(members: Sequence[int], rank: int, device: torch.device) -> LinkSpeed | None:
    """A ring of some processes, measured by one of them; the others may be in rings of their own, or wait."""
    found = None
    if len(members) > 1:
        ring = ProcessRing(members, rank, device)
        words = [ring.step(torch.full((1,), rank, device=device)) for _ in range(_NUM_WORDS)]
        block = torch.full((_BLOCK_BYTES // 8,), rank, device=device)
        blocks = [ring.step(block) for _ in range(_NUM_BLOCKS)]
        found = LinkSpeed(_BLOCK_BYTES / min(blocks), median(words))
    dist.barrier()
    return found


def _as_table(
    speed: Speed, near: LinkSpeed | None, alone: LinkSpeed | None, together: LinkSpeed | None
) -> dict[str, Any]:
    links = {"near": near, "alone": alone, "together": together}
    known = {name: [link.bandwidth, link.latency_s] for name, link in links.items() if link is not None}
    return {"peaks": speed.peak_flops, "bandwidth": speed.memory_bandwidth, "memory": speed.memory_bytes, **known}


def _description(found: Sequence[dict[str, Any]], num_hosts: int, devices_per_host: int) -> dict[str, Any]:
    """The cluster's table, as `penstock plan --cluster` reads it."""

    def least(name: str) -> LinkSpeed | None:
        rows = [row[name] for row in found if name in row]
        return LinkSpeed(min(row[0] for row in rows), max(row[1] for row in rows)) if rows else None

    near, alone, together = least("near"), least("alone"), least("together")
    between = alone or near
    inside = near or alone
    assert between is not None and inside is not None, "a group of several processes has a link"
    # Rings beside each other share the adapter as far as each is slower than one alone.
    shared_by = max(1, min(devices_per_host, round(alone.bandwidth / together.bandwidth))) if alone and together else 1
    between = LinkSpeed(between.bandwidth, between.latency_s, shared_by)
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


def _link_table(link: LinkSpeed) -> dict[str, float | int]:
    return {
        "bandwidth_gb_s": _round(link.bandwidth / 1e9),
        "latency_us": _round(link.latency_s * 1e6),
        "shared_by": link.shared_by,
    }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# ---- The ranks of a pipeline over several hosts, measured for a cut by what each of them can do and hold


_WIDTH, _NUM_ROWS = 4096, 8


def measured_ranks(store: Store, group: Group, num_stages: int, device: Device) -> Sequence[DecodingRank]:
    """The ranks of the stages, all measured at the same time; none where the stages are on one host, or are shared.

    The first rank says on standard error what was found.
    """
    if group.is_on_one_host or num_stages != group.world_size:
        return ()
    exchange(store, group, "measuring", {})
    place = torch.device(device, group.local_rank) if device == "cuda" else torch.device("cpu")
    weight = torch.randn(_WIDTH, _WIDTH, device=place)
    rows = torch.randn(_NUM_ROWS, _WIDTH, device=place)
    seconds = best_s(lambda: torch.nn.functional.linear(rows, weight), place)
    if device == "cuda":
        room = torch.cuda.mem_get_info(place)[0]
    else:
        room = (memory_bytes("cpu") or 0) / (group.num_local or 1)
    own = DecodingRank(weight.numel() * weight.element_size() / seconds, room)
    ranks = [DecodingRank(**theirs) for theirs in exchange(store, group, "measured", own._asdict())]
    if group.rank == 0:
        found = ", ".join(f"{rank.bytes_per_s / 1e9:.1f}" for rank in ranks)
        print(
            f"penstock: the ranks read {found} GB of weights a second; each stage gets as much as its rank can do and "
            "hold",
            file=sys.stderr,
        )
    return ranks
