"""Cost of the check of every message: the same work with messages announced and without, in turns.

Two ranks over gloo. "actions" is a step of 1F1B without compute; "training" a step of the benchmark of training, and
"generation" that of generation, at half of their widths, where messages weigh more. Medians of seconds on the clock
and of a rank's processor time, which other work on the machine hardly changes; each ratio is that of checked over
unchecked, as the median over rounds in which both had their turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import main, new_parser
from benchmarks.generate import Generation
from benchmarks.overhead import over_gloo
from benchmarks.ranks import in_turns
from benchmarks.train import Training
from penstock import Layout, MicroBatchSpec, SamplingParams
from penstock.cli.doctor import processor_name
from penstock.cli.options import Parser
from penstock.engine import Engine, EngineOptions
from penstock.runtime import transport

CHECKED, UNCHECKED = "checked", "unchecked"
NUM_RANKS = 2


_NO_ENVELOPE = torch.zeros(1, dtype=torch.uint8)


class UncheckedReceive(transport._PostedReceive):
    """A receive that takes what comes."""

    def wait(self) -> Tensor:
        self.works[0].wait()
        self.transport._num_awaited -= 1
        return self.buffer


class UncheckedEnd(transport._ChannelEnd):
    """A link whose messages come without announcements."""

    def receive(self, buffer: Tensor) -> Any:
        return _NO_ENVELOPE, [self.backends[0].recv([buffer], self.peer, 0)]

    def send(self, tensor: Tensor, header: bytes = b"") -> None:
        self.sends.add((tensor, [_NO_ENVELOPE], [self.backends[0].send([tensor], self.peer, 0)]))


def prepare(side: str, rank: int) -> Callable[[], dict[str, float]]:
    """One side's turn: its seconds for each kind of work."""
    if side == UNCHECKED:
        transport._ChannelEnd, transport._PostedReceive = UncheckedEnd, UncheckedReceive
    half = ("--hidden-size", "256", "--intermediate-size", "704")
    training = Training.of(*half)
    trained = Engine(training.units(), training.hidden_size, Layout(pp=NUM_RANKS), EngineOptions(device="cpu"))
    generation = Generation.of(*half)
    generator = generation.engine(Layout(pp=NUM_RANKS))
    prompts, greedy = generation.prompts(generation.num_prompts), SamplingParams(generation.new_tokens, temperature=0)
    works: dict[str, Callable[[], object]] = {
        "actions": lambda: over_gloo(rank, "1f1b", NUM_RANKS, 200, 3),
        "training": lambda: trained.train_batch(
            training.batch(), micro_batches=MicroBatchSpec(training.num_microbatches)
        ),
        "generation": lambda: generator.generate(prompts, greedy),
    }

    def turn() -> dict[str, float]:
        found = {}
        for name, work in works.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            work()
            found[f"{name}, clock"], found[f"{name}, processor"] = (
                time.perf_counter() - start,
                time.process_time() - used,
            )
        return found

    return turn


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each kind of work on either side, and their ratio."""
    found = in_turns((CHECKED, UNCHECKED), NUM_RANKS, prepare, num_rounds=given.rounds)
    result: dict[str, Any] = {"processor": processor_name()}
    for name in found[CHECKED][0][0]:
        seconds = {
            side: [statistics.mean(turn[name] for turn in turns) for turns in zip(*ranks, strict=True)]
            for side, ranks in found.items()
        }
        ratios = sorted(a / b for a, b in zip(seconds[CHECKED], seconds[UNCHECKED], strict=True))
        result[name] = {side: statistics.median(of_side) for side, of_side in seconds.items()}
        result[name] |= {"ratio": statistics.median(ratios), "range": [ratios[0], ratios[-1]]}
    return result


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("messages", __doc__, "--rounds 5")
    parser.add_argument("--rounds", type=int, default=15, help="turns of either side")
    return parser


if __name__ == "__main__":
    sys.exit(main("messages"))
