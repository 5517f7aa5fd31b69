"""Fused pairs over experts that ranks share: the bits of plain execution, whoever waits for whom."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.engine.learning_rate import LearningRate
from penstock.engine.optimizer import OptimizerConfig
from penstock.engine.schedules import ScheduleChoice
from penstock.model import ExpertConfig, ModelConfig, decoder_units
from penstock.runtime import Pairs
from tests.dist.launch import run_ranks

STEPS = 3
EXPERTS = ExpertConfig(
    num_experts=4, num_active=2, intermediate_size=16, shared_size=12, num_dense_first=1, microbatch_loss=0.1
)


@dataclass(frozen=True)
class Run:
    """One way to train the same model on the same microbatches."""

    schedule: str
    num_microbatches: int = 5
    overlap: bool = True
    recompute: str = "none"
    stages_per_rank: int | None = None
    cut: tuple[int, ...] | None = None


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def config(num_layers: int = 4) -> ModelConfig:
    return ModelConfig(32, 16, 24, num_layers, 2, experts=EXPERTS)


def engine_of(run: Run, layout: Layout) -> Engine:
    options = EngineOptions(
        schedule=ScheduleChoice(run.schedule, run.stages_per_rank),
        cut=run.cut,
        recompute=run.recompute,
        optimizer=OptimizerConfig(LearningRate(1e-2)),
        pairs=Pairs(overlap=run.overlap),
        timeout_s=30.0,
    )
    return Engine(lambda groups: decoder_units(config(), groups=groups), config().hidden_size, layout, options)


def batches(dp_rank: int, num_microbatches: int) -> list[PackedBatch]:
    """A batch a step, of unequal lengths that differ between the ranks too."""
    generator = torch.Generator().manual_seed(100 * dp_rank + num_microbatches)
    found = []
    for _ in range(STEPS):
        lengths = torch.randint(2, 14, (num_microbatches + 2,), generator=generator).tolist()
        found.append(PackedBatch.from_documents([torch.randint(0, 32, (n,), generator=generator) for n in lengths]))
    return found


def trained(run: Run, layout: Layout) -> Outcome:
    """Losses, the last step's gradients and the final weights of this rank."""
    engine = engine_of(run, layout)
    spec = MicroBatchSpec(num=run.num_microbatches)
    losses = [
        engine.train_batch(batch, micro_batches=spec).loss
        for batch in batches(engine.grid.dp_rank, run.num_microbatches)
    ]
    gradients = {name: engine.gradient(name).clone() for name in engine.parameters()}
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    engine.close()
    return losses, gradients, weights


def all_trained(rank: int, runs: list[Run], layout: Layout) -> list[Outcome]:
    return [trained(run, layout) for run in runs]


def merged(outcomes: list[list[Outcome]], number: int, ranks: list[int]) -> Outcome:
    """What the ranks of one pipeline hold together after the run of that number."""
    parts = [outcomes[rank][number] for rank in ranks]
    assert all(losses == parts[0][0] for losses, _, _ in parts)
    gradients = {name: value for _, found, _ in parts for name, value in found.items()}
    return parts[0][0], gradients, {name: value for _, _, found in parts for name, value in found.items()}


def same_bits(one: Outcome, other: Outcome) -> bool:
    losses, *tensors = one
    other_losses, *other_tensors = other
    return losses == other_losses and all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(tensors, other_tensors, strict=True)
    )


def check(groups: list[list[Run]], layout: Layout) -> None:
    """All runs of a group come to the same bits, on every pipeline."""
    runs = [run for group in groups for run in group]
    outcomes = run_ranks(layout.world_size, all_trained, runs, layout, timeout_s=110.0)
    for pipeline in layout.groups("pp"):
        number = 0
        for group in groups:
            first = merged(outcomes, number, list(pipeline))
            assert len(first[1]) > 10
            for run in group[1:]:
                number += 1
                assert same_bits(first, merged(outcomes, number, list(pipeline))), (run, group[0], pipeline)
            number += 1


@pytest.mark.shows(20, 37, 41)
def test_one_rank_combined_equals_plain():
    groups = [
        [
            Run("1f1b", m, recompute=recompute),
            Run("combined-1f1b", m, recompute=recompute),
            Run("combined-1f1b", m, overlap=False, recompute=recompute),
        ]
        for m, recompute in ((1, "none"), (2, "none"), (5, "none"), (4, "full"))
    ]
    check(groups, Layout(dp=2, ep=2))
