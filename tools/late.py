"""Runs all that ranks do together as late as it may be, under many seeds, and compares each bit with a plain run.

    make late ARGS="--seeds 20"
    make late ARGS="--failures 150 --seeds 4"

Training, fused pairs, scoring, generation and checkpoints in the layouts of tests/late/jobs.py. The plain run is one of
real processes. Whoever frees, reads or overwrites a tensor that an operation between ranks still uses is named, and so
is an order of operations in which ranks would wait for each other for ever. Exits 1 when anything was found.

With `--failures`, real processes instead, whose steps fail one after another while what ends them waits at random; one
that took long is shown with the stacks of all threads. Other work beside it makes more orders happen.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.dist.test_failing_steps import CASES
from tests.late.failures import SLOW_S, campaign
from tests.late.jobs import JOBS, Job, first_difference, late, plain
from tests.late.operations import Lateness


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare runs in which all is late with plain ones, bit for bit.")
    parser.add_argument("--seeds", type=int, default=8, help="seeds for each job")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--failures", type=int, default=0, help="steps that fail, under each seed and in each layout")
    parser.add_argument("--case", type=int, help="the layout alone, by its number in tests/dist/test_failing_steps.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.failures:
        return failing_steps(options)
    num_found, start = 0, time.monotonic()
    by_size: dict[int, list[Job]] = defaultdict(list)
    for job in JOBS:
        by_size[job.layout.world_size].append(job)
    for jobs in by_size.values():
        with tempfile.TemporaryDirectory() as folder:
            expected = plain(jobs, Path(folder))
        for job, outcome in zip(jobs, expected, strict=True):
            for seed in range(options.first, options.first + options.seeds):
                finding = found(job, outcome, seed)
                num_found += finding is not None
                print(f"{job}, seed {seed}: {finding or 'the same bits'}", flush=True)
    runs = len(JOBS) * options.seeds
    print(f"{runs} late runs in {time.monotonic() - start:.0f} s: {runs - num_found} with the bits of a plain run")
    return 1 if num_found else 0


def failing_steps(options: argparse.Namespace) -> int:
    """Let steps fail in every layout; returns the exit code."""
    start, num_slow, num_failed = time.monotonic(), 0, 0
    for number in range(len(CASES)) if options.case is None else [options.case]:
        for seed in range(options.first, options.first + options.seeds):
            slow = campaign(number, options.failures, seed)
            steps = {one.step for of_rank in slow for one in of_rank}
            num_slow, num_failed = num_slow + len(steps), num_failed + options.failures
            print(f"{CASES[number]}, seed {seed}: {len(steps)} of {options.failures} failures heard late", flush=True)
            for rank, of_rank in enumerate(slow):
                for one in of_rank:
                    print(f"rank {rank}, {one}", flush=True)
    print(f"{num_failed} failures in {time.monotonic() - start:.0f} s: {num_slow} heard after more than {SLOW_S:g} s")
    return 1 if num_slow else 0


def found(job: Job, expected: list[dict[str, object]], seed: int) -> str | None:
    """What is wrong under a seed; None where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = late(job, Path(folder), Lateness.of(seed))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    difference = first_difference(expected, outcome)
    return None if difference is None else f"differs at {difference}"


if __name__ == "__main__":
    sys.exit(main())
