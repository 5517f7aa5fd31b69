"""`penstock doctor`: this machine, the groups of a layout, and a test of the links between its ranks."""

import argparse
import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.cli.options import Parser, add_json, add_options, parallel_options, values_of
from penstock.cli.output import print_json
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.machine import usable_cores
from penstock.cli.processes.meeting import Group, find_group
from penstock.settings import Groups, Layout, ParallelConfig

if TYPE_CHECKING:
    from penstock.cli.processes.session import Meeting

_COMMAND = WorkerCommand("penstock.cli.doctor", "tests them again", ("penstock.cli.processes.measure",))
_NUM_GROUPS_SHOWN = 4
_SIZES = ("pp", "dp", "cp", "tp", "ep")
# A link answers within seconds, or it is broken.
_PARALLEL = parallel_options((*_SIZES, "order", "device", "timeout"), timeout=30.0)


_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Instructions that decide how fast products of each kind are."""


def main(words: Sequence[str]) -> int:
    given = parser().parse_args(list(words))
    given.parallel = ParallelConfig(**values_of(given, _PARALLEL))
    group = find_group(os.environ)
    layout = chosen_layout(given, group)
    if given.no_links or layout.world_size == 1:
        show_layout(given, layout, None)
        return 0
    if group is None:
        return launch(_COMMAND, words, layout.world_size, 1)
    from penstock.cli.processes.measure import measure_links
    from penstock.cli.processes.session import work_together

    def work(meeting: "Meeting") -> None:
        links = measure_links(layout, meeting, given.parallel)
        if group.rank == 0:
            show_layout(given, layout, links)

    return work_together(group, 1, given.parallel.timeout_s, work)


def parser() -> Parser:
    parser = Parser(
        "penstock doctor",
        """Show what this machine has and which ranks of a layout talk to each other, and test the links between them: a
word and a block of data go round a ring of all processes, and every group of the layout is made and used once.
Started plainly, the processes are local ones on the loopback; under torchrun, Slurm or Kubernetes they are the
processes of that group, so real hosts are tested.""",
        examples=(
            ("penstock doctor", "this machine, and two processes on it"),
            ("penstock doctor --pp 2 --dp 2 --tp 2", "the groups of a layout, and eight processes"),
            ("penstock doctor --pp 16 --tp 8 --no-links", "the groups alone, nothing is started"),
            ("torchrun ... -m penstock doctor --pp 8", "the links of the hosts that torchrun has joined"),
        ),
    )
    add_options(parser, _PARALLEL, {"order": "AXES", "timeout": "SECONDS"})
    parser.add_argument("--no-links", action="store_true", help="start nothing and test no link")
    add_json(parser)
    return parser


def chosen_layout(given: argparse.Namespace, group: Group | None) -> Layout:
    """The requested layout; without sizes, a pipeline of all processes of the group, or of two.

    Raises: ValueError for a layout that is impossible or does not fit the group.
    """
    sizes = {axis: getattr(given.parallel, axis) for axis in _SIZES if getattr(given, axis) is not None}
    sizes = sizes or {"pp": 2 if group is None else group.world_size}
    layout = Layout(**sizes, order=given.parallel.order)
    if group is not None:
        layout.check(group.world_size)
    return layout


def show_layout(given: argparse.Namespace, layout: Layout, links: Mapping[str, Any] | None) -> None:
    """Print the findings; `links` is None if none were tested."""
    if given.json:
        sizes = {**{axis: getattr(layout, axis) for axis in (*layout.axes, "ep")}, "order": layout.axes}
        print_json({"machine": machine(), "layout": sizes, "groups": group_table(layout), "links": links})
        return
    rows = [*machine().items(), ("layout", f"{layout}: {layout.world_size} processes"), *group_rows(layout)]
    if links is not None:
        rows += _link_rows(links)
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join(f"{name:{width}}{text}" for name, text in rows))


def machine() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    backends = [name for name in ("gloo", "nccl", "ucc", "mpi") if dist.is_backend_available(name)]
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    libraries = "transformers", "tokenizers", "datasets", "peft", "starlette", "matplotlib", "tensorboard", "rich"
    return {
        "machine": f"{platform.node()}: {platform.system()} {platform.release()}, {platform.machine()}",
        "processor": processor_name(),
        "cores": f"{usable_cores()} usable, {pages * page_bytes / 2**30:.1f} GiB of memory",
        "python": f"{platform.python_version()}, penstock {__version__}, torch {torch.__version__}",
        "backends": ", ".join(backends) or "none",
        "GPUs": ", ".join(found) or "none",
        "libraries": ", ".join(name for name in libraries if find_spec(name)),
    }


def processor_name() -> str:
    """Its model, family and number, and those of its instructions that products use, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = found.get("model name", platform.machine())
    number = f", family {found['cpu family']} model {found['model']}" if "cpu family" in found else ""
    has = [feature for feature in _FEATURES if feature in found.get("flags", "").split()]
    return f"{model}{number}" + (f" ({', '.join(has)})" if has else "")


def _link_rows(links: Mapping[str, Any]) -> list[tuple[str, str]]:
    hosts, word_us = list(dict.fromkeys(links["hosts"])), links["word_s"] * 1e6
    where = f"{len(links['hosts'])} processes on {', '.join(hosts)}" if len(hosts) < 5 else f"{len(hosts)} hosts"
    return [
        ("ring test", f"passed: {where}, {links['device']}"),
        ("", f"{word_us:,.0f} us a step with a word, {links['block_bytes_per_s'] / 2**20:,.0f} MiB/s a link"),
        ("groups", f"all made and used in {links['connect_s']:.2f} s"),
    ]


def group_table(layout: Layout) -> dict[str, Groups]:
    """The layout's groups of more than one rank, by what their ranks share."""
    kinds = {
        "pipelines (pp)": layout.groups("pp"),
        "sharing layers (tp)": layout.groups("tp"),
        "sharing sequences (cp)": layout.groups("cp"),
        "sharing experts (ep)": layout.expert_groups(),
        "summing gradients (dp x cp)": layout.groups("dp", "cp"),
        "summing experts' gradients": layout.expert_copies() if layout.ep > 1 else (),
    }
    several = {name: tuple(ranks for ranks in groups if len(ranks) > 1) for name, groups in kinds.items()}
    return {name: groups for name, groups in several.items() if groups}


def group_rows(layout: Layout) -> list[tuple[str, str]]:
    """The name and the first few groups of every kind, as text."""
    rows = []
    for name, groups in group_table(layout).items():
        more = [f"and {len(groups) - _NUM_GROUPS_SHOWN} more"] if len(groups) > _NUM_GROUPS_SHOWN else []
        rows.append((name, "   ".join([*map(_ranks, groups[:_NUM_GROUPS_SHOWN]), *more])))
    return rows


def _ranks(ranks: tuple[int, ...]) -> str:
    """``0 1 2``, or for more than eight ranks in equal steps ``0 8 ... 56``."""
    if len(ranks) > 8 and len({later - earlier for earlier, later in itertools.pairwise(ranks)}) == 1:
        return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
    return " ".join(map(str, ranks))
