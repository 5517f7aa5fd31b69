"""Time and memory that plans for three sizes of a cluster take, and whether the same plan is found twice.

Each plan is made in a process of its own; seconds are of its processor time.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import main, new_parser, progress
from penstock.cli.options import Parser
from penstock.cli.output import print_table
from penstock.planner.cluster import Cluster
from penstock.planner.estimate import Workload
from penstock.planner.search import plan
from penstock.planner.shape import published_model

SECONDS_ALLOWED, BYTES_ALLOWED = 60.0, 2 * 2**30
"""What planning for 10,000 devices may take."""


@dataclass(frozen=True)
class PlanSize:
    """A published model on a number of devices, with so many sequences a step."""

    model: str
    devices: int
    sequences: int
    seq_len: int = 8192
    host: str = "h100"


SIZES = (
    PlanSize("llama3-8b", 64, 1024),
    PlanSize("llama3-70b", 1024, 1024),
    PlanSize("llama3-405b", 10_240, 10_240),
)


def plan_twice(sizes: Sequence[PlanSize], effort: float) -> Iterator[dict[str, Any]]:
    """Plan each size twice, with that effort, each time in a process of its own."""
    context = multiprocessing.get_context("spawn")
    for size in sizes:
        progress(f"planning {size.model} on {size.devices:,} devices, twice")
        found = []
        for _ in range(2):
            with context.Pool(1) as pool:
                found.append(pool.apply(_plan, (size, effort)))
        yield {
            "model": size.model,
            "devices": size.devices,
            "best": found[0]["best"],
            "simulated": found[0]["simulated"],
            "seconds": max(one["seconds"] for one in found),
            "peak_bytes": max(one["peak_bytes"] for one in found),
            "same_plan": found[0]["digest"] == found[1]["digest"],
        }


def _plan(size: PlanSize, effort: float) -> dict[str, Any]:
    """One plan: its seconds of processor time and peak memory, its first layout, and a digest of all of it.

    Whatever it may leave to processes of its own counts too.
    """
    start = processor_seconds()
    workload = Workload(published_model(size.model), size.seq_len, size.sequences)
    found = plan(workload, Cluster.named(size.host, size.devices), effort=effort)
    seconds = processor_seconds() - start
    rows = [(str(one.candidate), one.candidate.cut, one.step_s, one.peak_bytes) for one in found.tried]
    whole = json.dumps([rows, [str(one.candidate) for one in found.best], found.left_out, found.known])
    return {
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
        "best": str(found.best[0].candidate),
        "simulated": len(found.tried),
        "digest": hashlib.sha256(whole.encode()).hexdigest(),
    }


def processor_seconds() -> float:
    """Time that this process and its children that have ended have computed."""
    return sum(one.ru_utime + one.ru_stime for one in _usage())


def peak_bytes() -> int:
    """The most memory of this process, and beside it that of the largest of its children that have ended."""
    return sum(one.ru_maxrss for one in _usage()) * 1024


def _usage() -> list[resource.struct_rusage]:
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Plan for each number of devices."""
    return {
        "plans": list(plan_twice([size for size in SIZES if size.devices in given.devices], given.effort)),
        "seconds_allowed": SECONDS_ALLOWED,
        "bytes_allowed": BYTES_ALLOWED,
    }


def show(result: dict[str, Any]) -> None:
    """Print the plans as a table."""
    head = ["model", "devices", "simulated", "seconds", "memory", "twice the same", "first of the plan"]
    rows = [
        [
            row["model"],
            f"{row['devices']:,}",
            str(row["simulated"]),
            f"{row['seconds']:.1f}",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
            "yes" if row["same_plan"] else "NO",
            row["best"],
        ]
        for row in result["plans"]
    ]
    print_table([head, *rows])


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("plan_time", __doc__, "--devices 64 --effort 0.1")
    devices = [size.devices for size in SIZES]
    parser.add_argument("--devices", type=int, nargs="+", choices=devices, default=devices, help="plan for so many")
    parser.add_argument("--effort", type=float, default=1.0, metavar="F", help="of these plans")
    return parser


if __name__ == "__main__":
    sys.exit(main("plan_time"))
