"""Cost of an action beyond its compute, in microseconds.

Stages hand on a ready tensor, so that only the engine takes time: with its transfers over gloo between processes, and
in one process. Over gloo the ranks run in parallel, and a rank's waiting for its neighbour's overhead is counted too.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import main, new_parser, spread
from benchmarks.ranks import on_ranks
from penstock import schedule
from penstock.cli.options import Parser
from penstock.model import NOTHING_GIVEN, Given, Lane, Sequences
from penstock.runtime import (
    Boundary,
    DistributedTransport,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Message,
    Pairs,
    Recorder,
    Stage,
    Tape,
    run_together,
)
from penstock.runtime.stage import ALONE, ResultFn

NUM_TOKENS, HIDDEN_SIZE = 4, 8


class EmptyStage(Stage):
    """A stage without compute: each lane ends at once."""

    #: what every lane gives
    _ready: Message

    def __init__(self, index: int) -> None:
        super().__init__(index, [("empty", torch.nn.Identity())], Boundary(HIDDEN_SIZE, torch.float32))
        self._ready = Message((torch.zeros(NUM_TOKENS, HIDDEN_SIZE),))

    def forward(
        self,
        tape: Tape | None,
        x: Message,
        sequences: Sequences,
        result_fn: ResultFn | None = None,
        given: Given = NOTHING_GIVEN,
    ) -> Lane[Message]:
        return self._ready
        yield

    def backward(self, tape: Tape, grad: Message | None, split: bool = False, pairs: Pairs = ALONE) -> Lane[Message]:
        return self._ready
        yield


def _feeds(num_microbatches: int) -> list[Feed]:
    sequences, x = Sequences.from_lengths([NUM_TOKENS]), torch.zeros(NUM_TOKENS, HIDDEN_SIZE)
    return [Feed(NUM_TOKENS, sequences, x, lambda output: output)] * num_microbatches


def _program(name: str, num_ranks: int, num_microbatches: int) -> schedule.Program:
    return schedule.lower(schedule.build(name, ranks=num_ranks, microbatches=num_microbatches))


def _times_s(run: Callable[[], object], num_runs: int) -> list[float]:
    # A collection that walks through all of PyTorch's objects takes as long as a thousand actions.
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(num_runs + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times[1:]


def over_gloo(rank: int, name: str, num_ranks: int, num_microbatches: int, num_runs: int) -> list[float]:
    program, world = _program(name, num_ranks, num_microbatches), dist.group.WORLD
    assert world is not None
    transport = DistributedTransport(program.placement, world, torch.device("cpu"), timeout_s=60.0)
    executor = Executor(program, {rank: EmptyStage(rank)}, transport, Recorder(rank))
    feeds = _feeds(num_microbatches)

    def run() -> None:
        dist.barrier()
        executor.run(feeds)

    return _times_s(run, num_runs)


def _in_process(name: str, num_ranks: int, num_microbatches: int, num_runs: int) -> list[float]:
    program, hub, feeds = _program(name, num_ranks, num_microbatches), InProcessHub(), _feeds(num_microbatches)
    executors = [
        Executor(program, {rank: EmptyStage(rank)}, InProcessTransport(hub, rank), Recorder(rank))
        for rank in range(num_ranks)
    ]
    return _times_s(lambda: run_together(executors, [feeds] * num_ranks), num_runs)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Time one compute action with its transfers, on one rank; median and range over runs.

    In process the ranks run one after the other, so the time is shared by the actions of all of them.
    """
    what, per_rank = (given.schedule, given.ranks, given.microbatches, given.steps), 2 * given.microbatches
    gloo = on_ranks(given.ranks, over_gloo, *what)
    times = {
        "gloo": [max(run) / per_rank for run in zip(*gloo, strict=True)],
        "in_process": [t / (per_rank * given.ranks) for t in _in_process(*what)],
    }
    return {"schedule": given.schedule, "ranks": given.ranks, "microbatches": given.microbatches} | {
        f"{side}_us": spread([1e6 * time_s for time_s in found]) for side, found in times.items()
    }


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("overhead", __doc__, "--schedule zb-h1 --ranks 4")
    parser.add_argument("--schedule", default="1f1b", help="a name that `penstock schedule list` prints")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, default=200, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run")
    return parser


if __name__ == "__main__":
    sys.exit(main("overhead"))
