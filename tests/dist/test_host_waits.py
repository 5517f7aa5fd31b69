"""Nothing synchronises the device: between a program's first action and its last nobody reads anything back."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import NO_LABEL, Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.engine.scoring import token_scores
from penstock.model import decoder_units
from penstock.runtime import Executor, Feed
from penstock.settings import ModelConfig, OptimizerConfig, Precision
from tests.dist.launch import run_ranks
from tests.host_waits import HostWaits

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, max_length=32)

CASES = [
    ("1f1b", Precision.FP32),
    ("1f1b", Precision.BF16),
    ("1f1b", Precision.FP16),
    ("interleaved", Precision.FP32),
    ("zb-v", Precision.FP32),
    ("combined-1f1b", Precision.FP32),
    ("dualpipe", Precision.FP32),
]


def batch() -> PackedBatch:
    """A few tokens of all have a label, so that the others are left out of the head."""
    generator = torch.Generator().manual_seed(0)
    found = PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in (5, 3, 8, 4, 6, 2)])
    found["labels"][::2] = NO_LABEL
    return found


def run_watched(rank: int, layout: Layout) -> list[tuple[list[str], Counter[str], int]]:
    """For each case: what was done, what was read back while programs ran, and how many operations were seen."""
    waits, run = HostWaits(), Executor.run

    def watched(executor: Executor, feeds: Sequence[Feed]) -> list[Tensor]:
        ran.append("training" if executor.training else "scoring")
        with waits.watch():
            return run(executor, feeds)

    Executor.run, found = watched, []  # type: ignore[method-assign]
    for name, precision in CASES if layout.tp == 1 else CASES[:1]:
        ran: list[str] = []
        waits = HostWaits()
        options = EngineOptions(name, precision=precision, optimizer=OptimizerConfig(clip_norm=0.5), timeout_s=60.0)
        engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, layout, options)
        spec = MicroBatchSpec(num=4)
        for _ in range(2):
            engine.train_batch(batch(), micro_batches=spec)
        engine.forward(batch(), token_scores(), micro_batches=spec)
        engine.close()
        engine.grid.close()
        found.append((ran, waits.reads, waits.num_operations))
    return found


@pytest.mark.shows(8)
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, tp=2)], ids=str)
def test_while_a_program_runs_nothing_is_read_back(layout: Layout) -> None:
    for found in run_ranks(layout.world_size, run_watched, layout, timeout_s=90.0):
        for ran, reads, num_operations in found:
            assert ran == ["training", "training", "scoring"]
            assert reads == Counter()
            assert num_operations > 100


class Reading(torch.autograd.Function):
    """Reads a number in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * float(grads[0].sum())


X = torch.arange(4.0)
READINGS: dict[str, Callable[[], object]] = {
    "a number": lambda: X[0].item(),
    "a float": lambda: float(X.sum()),
    "an index": lambda: [10, 20][X[1].long()],
    "a condition": lambda: bool((X > 1).any()),
    "numbers": X.tolist,
    "an array": X.numpy,
    "a comparison": lambda: torch.equal(X, X + 1),
    "places": lambda: (X > 1).nonzero(),
    "places by where": lambda: torch.where(X > 1),
    "rows by a mask": lambda: X[X > 1],
    "rows by a mask, chosen": lambda: torch.masked_select(X, X > 1),
    "rows set by a mask": lambda: X.clone().__setitem__(X > 1, torch.ones(2)),
    "different ones": lambda: torch.unique(X),
    "repeated ones": lambda: torch.repeat_interleave(X, X.long()),
    "to the host": X.cpu,
    "to a device": lambda: X.to("meta"),
    "copied to a device": lambda: torch.empty(4, device="meta").copy_(X),
    "a number in a backward": lambda: Reading.apply(X.clone().requires_grad_()).sum().backward(),
}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS.keys())
def test_every_kind_of_reading_is_noticed(reading: Callable[[], object]) -> None:
    waits = HostWaits()
    with waits.watch():
        reading()
    assert waits.reads.total() >= 1


def test_what_stays_on_the_device_is_no_reading() -> None:
    waits, weight = HostWaits(), torch.ones(4, 4, requires_grad=True)
    with waits.watch():
        rows = torch.nn.functional.softmax(X.reshape(1, 4) @ weight, -1)[torch.tensor([0, 0])]
        rows.to(torch.float64).masked_fill(rows > 2, 0.0).sum().backward()
    assert waits.reads == Counter() and waits.num_operations > 5
