"""Microbatches that keep all activations: which are computed again, and what their step takes, as simulated."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.schedule import Costs, Op, simulate
from penstock.schedule.actions import flatten
from penstock.settings import ScheduleConfig
from tests.dist.launch import run_ranks

pytestmark = pytest.mark.subject("src/penstock/**/*.py")

VOCAB, WIDTH = 16, 8
FORWARD_S = 0.03
# Layer and microbatch of each call of this process, in its order.
CALLS: list[tuple[int, int]] = []


class Noting(nn.Module):
    """A layer that notes for which microbatch it is called, takes its time, and counts even ones in a buffer."""

    count: Tensor

    def __init__(self, number: int, takes_s: float) -> None:
        super().__init__()
        self.number, self.takes_s, self.linear = number, takes_s, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        CALLS.append((self.number, microbatch))
        if self.training and microbatch % 2 == 0:
            # On two ranks those that keep all: what the others saw is put back although they have not changed it.
            self.count += 1
        time.sleep(self.takes_s)
        return torch.tanh(self.linear(x) + self.count)


def engine_of(pp: int, schedule: str | ScheduleConfig, num_layers: int, takes_s: float = 0.0, **options: Any) -> Engine:
    torch.manual_seed(0)
    layers = [Noting(number, takes_s) for number in range(num_layers)]
    model = [nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB)]
    named = EngineOptions(schedule, device="cpu", timeout_s=60.0, **options)
    return Engine.from_layers(model, WIDTH, Layout(pp=pp), named)


def batch(num: int) -> PackedBatch:
    return PackedBatch.from_documents([torch.arange(5) % VOCAB for _ in range(num)])


CASES = [("1f1b", 1, 6), ("interleaved", 1, 6), ("zb-v", 1, 6), ("combined-1f1b", 1, 6), ("1f1b", 2, 5)]


def called(rank: int, pp: int) -> list[tuple[Any, ...]]:
    found = []
    for schedule, num_kept, num in CASES:
        own = []
        for options in ({"recompute": "full", "num_kept_microbatches": num_kept}, {}):
            engine = engine_of(pp, schedule, 6, **options)
            CALLS.clear()
            spec = MicroBatchSpec(num=num)
            losses = [engine.train_batch(batch(num), micro_batches=spec).loss for _ in range(2)]
            layers = {
                module.number: stage.index
                for stage in engine.pipeline.model.stages.values()
                for _, module in stage.units
                if isinstance(module, Noting)
            }
            weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
            kept = [
                (action.stage, action.microbatch)
                for action in flatten(engine.pipeline.program(num).ranks[rank])
                if action.op is Op.F and action.keeps
            ]
            own.append((list(CALLS), layers, kept, len(engine.pipeline.model.stages), losses, weights))
            engine.close()
            engine.grid.close()
        found.append(tuple(own))
    return found


@pytest.mark.shows(178, 188)
@pytest.mark.parametrize("pp", [2, 3])
def test_the_marked_microbatches_and_no_others_are_not_computed_again(pp: int) -> None:
    for rank, of_rank in enumerate(run_ranks(pp, called, pp)):
        for (schedule, num_kept, num), (ours, plain) in zip(CASES, of_rank, strict=True):
            calls, layers, kept, num_stages, *numbers = ours
            expected = [
                (layer, microbatch)
                for layer, stage in layers.items()
                for microbatch in range(num)
                for _ in range(2 * (1 if (stage, microbatch) in kept else 2))
            ]
            assert sorted(calls) == sorted(expected), (schedule, rank)
            assert 0 < len(kept) < num * num_stages or pp - rank <= num_kept
            if schedule == "1f1b":
                outstanding = min(pp - rank, num)
                assert kept == [(rank, i) for i in range(num) if i % outstanding < num_kept]
            assert len(plain[0]) == 2 * num * len(layers) and not plain[2]
            assert numbers[0] == plain[4]
            assert all(torch.equal(value, plain[5][name]) for name, value in numbers[1].items())


def stepped(rank: int) -> list[tuple[float, float]]:
    """Measured and simulated makespans, in seconds, of a step where one microbatch of a stage keeps all, none, all."""
    found = []
    for options in ({"num_kept_microbatches": 1, "recompute": (1, 2, 3)}, {"recompute": (1, 2, 3)}, {}):
        engine = engine_of(3, ScheduleConfig("1f1b", cut=(2, 1, 2)), 3, FORWARD_S, **options)
        spec, seconds = MicroBatchSpec(num=6), []
        for _ in range(5):
            engine.train_batch(batch(6), micro_batches=spec)
            timeline = engine.timeline()
            seconds.append(0.0 if timeline is None else timeline.makespan / 1e3)
        again = FORWARD_S if options else 0.0
        costs = Costs(FORWARD_S, again, 0.0, recompute=again)
        found.append((min(seconds), simulate(engine.pipeline.program(6), costs).makespan))
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(188)
def test_a_step_takes_what_is_simulated_between_those_of_none_and_of_full() -> None:
    kept, full, none = run_ranks(3, stepped)[0]
    assert none[1] < kept[1] < full[1]
    for measured, simulated in (kept, full, none):
        # Nothing else takes time; a busy machine adds some.
        assert simulated <= measured < 1.25 * simulated + 0.03
    assert none[0] < kept[0] < full[0]
