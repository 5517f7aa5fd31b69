"""Overheads: of an action beyond its compute, and of a backward that is split into I and W.

The stages of the first hand on a ready tensor, so that only the engine takes time. The second times one stage of a
real model in this process.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import on_ranks, spread
from benchmarks.train import Training
from penstock import schedule
from penstock.engine.build import build_stages
from penstock.engine.options import EngineOptions
from penstock.model import NOTHING_GIVEN, Given, Lane, Sequences, drain
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
from penstock.runtime.host_memory import keep_freed_memory
from penstock.runtime.pairs import ALONE
from penstock.runtime.stage import Finish

NUM_TOKENS, HIDDEN_SIZE = 4, 8


class EmptyStage(Stage):
    """A stage without compute: each lane ends at once."""

    #: what every lane gives
    _ready: torch.Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index, [("empty", torch.nn.Identity())], Boundary(HIDDEN_SIZE, torch.float32))
        self._ready = torch.zeros(NUM_TOKENS, HIDDEN_SIZE)

    def forward(
        self,
        tape: Tape | None,
        x: Tensor,
        sequences: Sequences,
        finish: Finish | None = None,
        given: Given = NOTHING_GIVEN,
    ) -> Lane[Tensor]:
        return self._ready
        yield

    def backward(
        self, tape: Tape, grad: Tensor | None, split: bool = False, pairs: Pairs = ALONE
    ) -> Lane[Tensor | None]:
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
    """Time one compute action with its transfers, on one rank, in microseconds; median and range over runs.

    Over gloo the ranks run in parallel, and a rank's waiting for its neighbour's overhead is counted too. In process
    they run one after the other, so the time is shared by the actions of all ranks.
    """
    per_rank = 2 * num_microbatches
    gloo = on_ranks(num_ranks, _over_gloo, name, num_ranks, num_microbatches, num_runs)
    times = {
        "gloo": [max(run) / per_rank for run in zip(*gloo, strict=True)],
        "in_process": [t / (per_rank * num_ranks) for t in _in_process(name, num_ranks, num_microbatches, num_runs)],
    }
    return {"schedule": name, "ranks": num_ranks, "microbatches": num_microbatches} | {
        f"{side}_us": spread([1e6 * time_s for time_s in found]) for side, found in times.items()
    }


def measure_split(training: Training | None = None, num_runs: int = 15) -> dict[str, Any]:
    """Time a whole and a split backward in turn: median and range of seconds and of the ratio of each pair.

    The stage is the middle half of the model's layers: no embedding and no head. The time is that of the one
    computing thread. Memory is kept for reuse, as engines keep it: otherwise the system would zero new pages for the
    tensors that wait for their W each time, which costs several percent.
    """
    training = training or Training()
    keep_freed_memory()
    torch.set_num_threads(1)
    units, boundary = training.units(), Boundary(training.hidden_size, torch.float32)
    first = 1 + training.num_layers // 2
    cut = (range(first, first + training.num_layers),)
    stage = build_stages(units, cut, (0,), boundary, EngineOptions(), torch.device("cpu"))[0]
    sequences = Sequences.from_lengths(training.lengths)
    x, grad = torch.randn(2, *boundary.shape(sequences.num_tokens)).unbind()
    times = [
        tuple(_backward_s(stage, x, grad, sequences, split) for split in (False, True)) for _ in range(num_runs + 1)
    ][1:]
    ratios = [split / whole for whole, split in times]
    return {
        "whole_s": spread([whole for whole, _ in times]),
        "split_s": spread([split for _, split in times]),
        "ratio": spread(ratios),
        "ratio_allowed": 1.02,
    }


def _backward_s(stage: Stage, x: torch.Tensor, grad: torch.Tensor, sequences: Sequences, split: bool) -> float:
    tape = Tape()
    drain(stage.forward(tape, x, sequences))
    start = time.thread_time()
    drain(stage.backward(tape, grad, split))
    stage.weight_backward(tape)
    return time.thread_time() - start
