"""What `penstock doctor` finds: this machine, the groups of a layout, and how its links carry."""

import os
import platform
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock import __version__
from penstock.cli.commands import print_json
from penstock.cli.doctor_arguments import DoctorArguments
from penstock.cli.launch import Group, agree
from penstock.cli.layout_groups import group_rows, group_table
from penstock.cli.together import choose_device, initialise, work_together
from penstock.parallel import connect
from penstock.runtime import PipelineError
from penstock.settings import AXES, Layout

_NUM_WORDS = 20
_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Links:
    """What a ring of all processes and the layout's groups did.

    hosts: the machine of each rank. word_s: a step of the ring with eight bytes, the median. block_bytes_per_s: what
    each rank sent in a step of the ring with a large block. connect_s: making and using all groups.
    """

    device: str
    hosts: tuple[str, ...]
    word_s: float
    block_bytes_per_s: float
    connect_s: float


def chosen_layout(arguments: DoctorArguments, group: Group | None) -> Layout:
    """The layout that is asked for; without sizes a pipeline of the processes there are, or of two.

    Raises: ValueError for a layout that can not be, or that does not fit the group.
    """
    sizes = arguments.sizes or {"pp": 2 if group is None else group.world_size}
    layout = Layout(
        *(sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp", "ep")), order="-".join(arguments.order or AXES)
    )
    if group is not None:
        layout.check(group.world_size)
    return layout


def run_worker(arguments: DoctorArguments, layout: Layout, group: Group) -> int:
    """Test the links as one process of `group`; returns the exit code."""
    return work_together(group, 1, arguments.timeout_s, lambda store: _test(arguments, layout, group, store))


def _test(arguments: DoctorArguments, layout: Layout, group: Group, store: Store) -> None:
    hosts = [told["host"] for told in agree(store, group, "hosts", {"host": platform.node()})]
    device_name = choose_device(store, group, arguments.device)
    initialise(store, group, device_name, arguments.timeout_s)
    device = torch.device(device_name, group.local_rank) if device_name == "cuda" else torch.device("cpu")
    ring = _Ring(group, device)
    times = [ring.step(torch.full((1,), group.rank, device=device)) for _ in range(_NUM_WORDS)]
    block = torch.full((_BLOCK_BYTES // 8,), group.rank, device=device)
    block_s = min(ring.step(block) for _ in range(3))
    start = time.perf_counter()
    connect(layout, device, timedelta(seconds=arguments.timeout_s))
    connect_s = time.perf_counter() - start
    if group.rank == 0:
        word_s = sorted(times)[len(times) // 2]
        tell(arguments, layout, Links(str(device_name), tuple(hosts), word_s, _BLOCK_BYTES / block_s, connect_s))


@dataclass(frozen=True)
class _Ring:
    """All processes in a row, the last one followed by the first; each sends to the next."""

    group: Group
    device: torch.device

    def step(self, sent: Tensor) -> float:
        """Send to the next, and check what comes from the one before: its rank. Returns the seconds.

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


def tell(arguments: DoctorArguments, layout: Layout, links: Links | None) -> None:
    """Print what was found; `links` is None where none were tested."""
    if arguments.json:
        groups = {name: [list(ranks) for ranks in found] for name, found in group_table(layout).items()}
        print_json(
            {
                "machine": machine(),
                "layout": {**{axis: getattr(layout, axis) for axis in (*layout.axes, "ep")}, "order": layout.axes},
                "groups": groups,
                "links": links and asdict(links),
            }
        )
        return
    rows = [*machine().items(), ("layout", f"{layout}: {layout.world_size} processes"), *group_rows(layout)]
    if links is not None:
        rows += _link_rows(links)
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join(f"{name:{width}}{text}" for name, text in rows))


def machine() -> dict[str, str]:
    """What this machine and this installation are, in words."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    backends = [name for name in ("gloo", "nccl", "ucc", "mpi") if dist.is_backend_available(name)]
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    optional = [name for name in ("transformers", "tokenizers", "safetensors", "matplotlib") if find_spec(name)]
    return {
        "machine": f"{platform.node()}: {platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{_num_cores()} usable, {pages * page_bytes / 2**30:.1f} GiB of memory",
        "python": f"{platform.python_version()}, penstock {__version__}, torch {torch.__version__}",
        "backends": ", ".join(backends) or "none",
        "GPUs": ", ".join(found) or "none",
        "libraries": ", ".join(optional),
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _link_rows(links: Links) -> list[tuple[str, str]]:
    hosts = list(dict.fromkeys(links.hosts))
    where = f"{len(links.hosts)} processes on {', '.join(hosts)}" if len(hosts) < 5 else f"{len(hosts)} hosts"
    return [
        ("ring test", f"passed: {where}, {links.device}"),
        ("", f"{links.word_s * 1e6:,.0f} us a step with a word, {links.block_bytes_per_s / 2**20:,.0f} MiB/s a link"),
        ("groups", f"all made and used in {links.connect_s:.2f} s"),
    ]
