"""Extra cost of a backward that is split into I and W.

One stage of a model, its middle half without embedding and head, does whole and split backwards in turn in this
process. The time is that of the one computing thread. Memory is kept for reuse, as engines keep it: otherwise the
system would zero new pages for the tensors that wait for their W each time, which costs several percent.
"""

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.common import main, new_parser, spread
from benchmarks.train import Training
from penstock.cli.options import Parser
from penstock.engine.build import build_stages
from penstock.engine.options import EngineOptions
from penstock.model import Sequences, drain
from penstock.model.cpu.host_memory import keep_freed_memory
from penstock.runtime import Boundary, Message, Stage, Tape

RATIO_ALLOWED = 1.02


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Median and range of the seconds of either backward, and of the ratio of each pair."""
    training = Training.of("--products", given.products)
    keep_freed_memory()
    torch.set_num_threads(1)
    units, boundary = training.units(), Boundary(training.hidden_size, torch.float32)
    first = 1 + training.num_layers // 2
    members = {0: range(first, first + training.num_layers)}
    stage = build_stages(units, members, boundary, EngineOptions(), torch.device("cpu"))[0]
    sequences = Sequences.from_lengths(training.lengths)
    x, grad = torch.randn(2, *boundary.shape(sequences.num_tokens)).unbind()
    pairs = [
        tuple(_backward_s(stage, x, grad, sequences, split) for split in (False, True)) for _ in range(given.runs + 1)
    ][1:]
    return {
        "whole_s": spread([whole for whole, _ in pairs]),
        "split_s": spread([split for _, split in pairs]),
        "ratio": spread([split / whole for whole, split in pairs]),
        "ratio_allowed": RATIO_ALLOWED,
    }


def _backward_s(stage: Stage, x: torch.Tensor, grad: torch.Tensor, sequences: Sequences, split: bool) -> float:
    tape = Tape()
    drain(stage.forward(tape, Message((x,)), sequences))
    start = time.thread_time()
    drain(stage.backward(tape, Message((grad,)), split))
    stage.weight_backward(tape)
    return time.thread_time() - start


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("split", __doc__, "--products fastest")
    parser.add_argument("--products", choices=["torch", "fastest"], default="torch", help="matrix products")
    parser.add_argument("--runs", type=int, default=15, help="pairs of backwards, whole and split in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("split"))
