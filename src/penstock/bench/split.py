"""What it costs to split a backward: I and then W against B, of one stage of a real model in this process."""

import statistics
import time
from typing import Any

import torch

from penstock.bench.training import Training
from penstock.engine.build import build_stages
from penstock.engine.options import EngineOptions
from penstock.model import Sequences, drain
from penstock.runtime import Boundary, Stage, Tape
from penstock.runtime.host_memory import keep_freed_memory


def measure(training: Training | None = None, num_runs: int = 15) -> dict[str, Any]:
    """Seconds of a whole and of a split backward in turn, and the ratio of each pair; median and range.

    The stage is the middle half of the model's layers: no embedding and no head. Counted is the time of the one thread
    that computes. Memory is kept for reuse, as engines keep it: what waits for its W is new memory at first, and pages
    that the system has to fill with zeros again each time would cost several percent.
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
        "whole_s": _summary([whole for whole, _ in times]),
        "split_s": _summary([split for _, split in times]),
        "ratio": _summary(ratios),
        "ratio_allowed": 1.02,
    }


def _backward_s(stage: Stage, x: torch.Tensor, grad: torch.Tensor, sequences: Sequences, split: bool) -> float:
    tape = Tape()
    drain(stage.forward(tape, x, sequences))
    start = time.thread_time()
    drain(stage.backward(tape, grad, split))
    if split:
        stage.weight_backward(tape)
    return time.thread_time() - start


def _summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)]}
