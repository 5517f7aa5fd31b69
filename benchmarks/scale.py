"""Time and memory to build, lower, prove and simulate schedules.

Two of up to two million actions, and every one that trains on up to 1,024 ranks, each in a process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import main, new_parser
from penstock import schedule
from penstock.cli.options import Parser
from penstock.schedule import builders

MAX_SECONDS, MAX_BYTES = 20.0, 2 * 2**30  # limits for the largest size


@dataclass(frozen=True)
class Size:
    """The size of a schedule."""

    ranks: int
    stages_per_rank: int
    microbatches: int


# Equally many actions for both schedules: 0.1, 0.5 and 2 million, counting transfers.
SIZES = {
    "interleaved": (Size(16, 4, 325), Size(32, 4, 650), Size(64, 4, 1300)),
    "1f1b": (Size(16, 1, 1300), Size(32, 1, 2600), Size(64, 1, 5200)),
}

_ROOT = Path(__file__).parents[1]
_IN_OWN_PROCESS = """
import json, sys
from benchmarks.scale import Size, timed
name, *counts = sys.argv[1:]
print(json.dumps(timed(name, Size(*map(int, counts)))))
"""

# Every schedule that trains, on as many ranks as a pipeline may have, with few microbatches.
MANY_RANKS, FEW_MICROBATCHES = (64, 256, 1024), 64


def sizes_of_all() -> dict[str, tuple[Size, ...]]:
    """Growing numbers of ranks for each schedule that trains, by name."""
    return {
        name: tuple(Size(ranks, schedule.default_stages(name), FEW_MICROBATCHES) for ranks in MANY_RANKS)
        for name in schedule.names()
        if builders.trains(name)
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part and peak resident memory of each schedule and size.

    Raises: RuntimeError with the output of a process that failed.
    """
    found = [_in_own_process(name, size) for name, sizes in SIZES.items() for size in sizes]
    many = [_in_own_process(name, size) for name, sizes in sizes_of_all().items() for size in sizes]
    return {
        "sizes": found,
        "many ranks": [
            {key: row[key] for key in ("schedule", "ranks", "num_actions", "build_s", "total_s", "peak_memory_bytes")}
            for row in many
        ],
        "largest": {
            "total_s": max(row["total_s"] for row in found),
            "total_s_allowed": MAX_SECONDS,
            "peak_memory_bytes": max(row["peak_memory_bytes"] for row in found),
            "peak_memory_bytes_allowed": MAX_BYTES,
        },
    }


def _in_own_process(name: str, size: Size) -> dict[str, Any]:
    words = [name, *map(str, asdict(size).values())]
    done = subprocess.run(
        [sys.executable, "-c", _IN_OWN_PROCESS, *words], capture_output=True, text=True, check=False, cwd=_ROOT
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} at {size} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def timed(name: str, size: Size) -> dict[str, Any]:
    """Time each part in this process, which should have done nothing before."""
    laps = [time.perf_counter()]
    built = schedule.build(name, ranks=size.ranks, microbatches=size.microbatches, stages_per_rank=size.stages_per_rank)
    laps.append(time.perf_counter())
    program = schedule.lower(built)
    laps.append(time.perf_counter())
    proof = schedule.verify(program)
    laps.append(time.perf_counter())
    schedule.simulate(program)
    laps.append(time.perf_counter())
    parts = dict(zip(("build_s", "lower_s", "verify_s", "simulate_s"), (b - a for a, b in pairwise(laps))))
    # Linux counts it in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "schedule": name,
        **asdict(size),
        "num_actions": proof.num_actions,
        **parts,
        "total_s": laps[-1] - laps[0],
        "peak_memory_bytes": peak,
        "microseconds_per_action": 1e6 * (laps[-1] - laps[0]) / proof.num_actions,
        "memory_bytes_per_action": peak / proof.num_actions,
    }


def parser() -> Parser:
    """This benchmark has no options of its own."""
    return new_parser("scale", __doc__)


if __name__ == "__main__":
    sys.exit(main("scale"))
