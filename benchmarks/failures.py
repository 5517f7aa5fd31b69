"""Time until a failure on one rank is raised on all of them, and the next step can be taken.

Along each axis of the layout the last rank's loss raises in one step after another, each in another microbatch.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import main, new_parser, spread
from benchmarks.ranks import on_ranks
from penstock.cli.options import Parser
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.training.loss import token_cross_entropy
from penstock.model import decoder_units
from penstock.runtime import StepError
from penstock.settings import Layout, ModelConfig

_MODEL = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=2)
_NUM_MICROBATCHES = 8
_LENGTHS = (9, 7, 8, 5, 6, 9, 4, 8)


@dataclass(frozen=True)
class _Times:
    """One rank's moments, by failure, on the host's clock; `raised` holds None where another rank fails."""

    raised: list[float | None]
    heard: list[float]


def _fail(rank: int, axis: str, num_failures: int) -> _Times:
    """Let the last rank's loss raise in one step after another, each in another microbatch; the next step succeeds."""
    torch.set_num_threads(1)
    num_ranks = torch.distributed.get_world_size()
    layout = {"pp": Layout(pp=num_ranks), "dp": Layout(dp=num_ranks), "tp": Layout(tp=num_ranks)}[axis]
    engine = Engine(lambda groups: decoder_units(_MODEL, groups=groups), _MODEL.hidden_size, layout, EngineOptions())
    batch = PackedBatch.from_documents([torch.arange(length) for length in _LENGTHS])
    times = _Times([], [])
    for failure in range(num_failures):
        losses, raised = iter(range(_NUM_MICROBATCHES)), [None]

        def loss(output: Any, microbatch: PackedBatch) -> Tensor:
            if rank == num_ranks - 1 and next(losses) == failure % _NUM_MICROBATCHES:  # noqa: B023
                raised[0] = time.monotonic()  # type: ignore[call-overload]  # noqa: B023
                raise ArithmeticError("made to fail")
            return token_cross_entropy(output, microbatch)

        try:
            engine.train_batch(batch, loss, micro_batches=MicroBatchSpec(_NUM_MICROBATCHES))
        except StepError:
            times.heard.append(time.monotonic())
        times.raised.append(raised[0])
        engine.train_batch(batch, micro_batches=MicroBatchSpec(_NUM_MICROBATCHES))
    engine.close()
    return times


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """By axis of the layout, the median and range of the time to the last rank's StepError, in milliseconds."""
    found: dict[str, Any] = {"ranks": given.ranks, "failures": given.failures}
    for axis in ("pp", "dp", "tp"):
        by_rank = [asdict(times) for times in on_ranks(given.ranks, _fail, axis, given.failures)]
        heard = [max(moments) for moments in zip(*(times["heard"] for times in by_rank), strict=True)]
        raised = by_rank[-1]["raised"]
        found[f"{axis}_ms"] = spread([1e3 * (end - start) for start, end in zip(raised, heard, strict=True)])
    return found | {"allowed_ms": 1000.0}


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("failures", __doc__, "--ranks 4")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the layout")
    parser.add_argument("--failures", type=int, default=20, help="failed steps of each layout")
    return parser


if __name__ == "__main__":
    sys.exit(main("failures"))
