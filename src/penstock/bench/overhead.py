"""What an action costs beyond its compute: stages that hand on a ready tensor, so that only the engine is left."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import schedule
from penstock.bench.ranks import on_ranks
from penstock.model import Lane, Sequences
from penstock.runtime import (
    Boundary,
    DistributedTransport,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Pairs,
    Recorder,
    Stage,
    Tape,
    run_together,
)
from penstock.runtime.stage import Finish

NUM_TOKENS, HIDDEN_SIZE = 4, 8


class EmptyStage(Stage):
    """A stage without compute: each lane ends at once."""

    def __init__(self, index: int) -> None:
        super().__init__(index, [("empty", torch.nn.Identity())], Boundary(HIDDEN_SIZE, torch.float32))
        self._ready = torch.zeros(NUM_TOKENS, HIDDEN_SIZE)

    def forward(self, tape: Tape | None, x: Tensor, sequences: Sequences, finish: Finish | None = None) -> Lane[Tensor]:
        return self._ready
        yield

    def backward(
        self, tape: Tape, grad: Tensor | None, split: bool = False, fill: bool = False, pair: Pairs | None = None
    ) -> Lane[Tensor | None]:
        return self._ready
        yield


def _feeds(num_microbatches: int) -> list[Feed]:
    sequences, x = Sequences.from_lengths([NUM_TOKENS]), torch.zeros(NUM_TOKENS, HIDDEN_SIZE)
    return [Feed(NUM_TOKENS, sequences, x, lambda output: output)] * num_microbatches


def _program(name: str, num_ranks: int, num_microbatches: int) -> schedule.Program:
    return schedule.lower(schedule.build(name, ranks=num_ranks, microbatches=num_microbatches))


def _times_s(run: Callable[[], object], num_runs: int) -> list[float]:
    times = []
    for _ in range(num_runs + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times[1:]


def _over_gloo(rank: int, name: str, num_ranks: int, num_microbatches: int, num_runs: int) -> list[float]:
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


def measure(name: str = "1f1b", num_ranks: int = 2, num_microbatches: int = 200, num_runs: int = 20) -> dict[str, Any]:
    """Microseconds of one compute action with its transfers, on one rank; median and range over runs.

    Over gloo the ranks run beside each other, and a rank's waiting for its neighbour's overhead is counted too. In
    process they run one after the other, so the time is shared by the actions of all ranks.
    """
    per_rank = 2 * num_microbatches
    gloo = on_ranks(num_ranks, _over_gloo, name, num_ranks, num_microbatches, num_runs)
    times = {
        "gloo": [max(run) / per_rank for run in zip(*gloo, strict=True)],
        "in_process": [t / (per_rank * num_ranks) for t in _in_process(name, num_ranks, num_microbatches, num_runs)],
    }
    return {"schedule": name, "ranks": num_ranks, "microbatches": num_microbatches} | {
        f"{side}_us": {
            "median": 1e6 * statistics.median(found),
            "range": [1e6 * min(found), 1e6 * max(found)],
        }
        for side, found in times.items()
    }
