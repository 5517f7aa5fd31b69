"""The optimizer's state shared out among ranks: the same weights, the same norms, the same refusals, fewer bytes."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import Engine, EngineOptions
from penstock.engine.training.loss import token_cross_entropy
from penstock.model import decoder_units
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig, Precision
from tests.covering import EVERY
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, tie_embeddings=True
)
NUM_STEPS = 3
BAD_STEP = 1


@dataclass(frozen=True)
class Case:
    layout: Layout
    precision: Precision
    schedule: str = "1f1b"


CASES = {
    2: [
        Case(Layout(dp=2), Precision.BF16),
        Case(Layout(dp=2), Precision.FP16),
        Case(Layout(cp=2), Precision.FP32),
    ],
    4: [
        Case(Layout(pp=2, dp=2), Precision.BF16, "interleaved"),
        Case(Layout(pp=2, dp=2), Precision.FP32, "dualpipe"),
        Case(Layout(dp=2, cp=2), Precision.FP64),
    ],
}
if EVERY:
    CASES[2].append(Case(Layout(dp=2), Precision.FP32))
    CASES[4] += [
        Case(Layout(pp=2, dp=2), Precision.FP32, "interleaved"),
        Case(Layout(pp=2, dp=2), Precision.BF16, "zb-h1"),
    ]


def trained(case: Case, zero: bool) -> dict[str, Any]:
    """Three steps, of which the second has a loss that is not finite on one rank alone."""
    optimizer = OptimizerConfig(LearningRate(peak=0.01), clip_norm=0.5, zero=zero)
    options = EngineOptions(case.schedule, precision=case.precision, optimizer=optimizer, timeout_s=30.0)
    engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, case.layout, options)
    grid = engine.grid
    last = (grid.dp_rank, grid.cp_rank) == (case.layout.dp - 1, case.layout.cp - 1)
    generator = torch.Generator().manual_seed(grid.dp_rank)
    documents = [torch.randint(0, 40, (n,), generator=generator) for n in (9, 6, 12, 7)]
    batch = PackedBatch.from_documents(documents)
    results = []
    for step in range(NUM_STEPS):
        spoiled = math.inf if step == BAD_STEP and last else 1.0

        def loss(output: Tensor, microbatch: PackedBatch, spoiled: float = spoiled) -> Tensor:
            return token_cross_entropy(output, microbatch) * spoiled

        result = engine.train_batch(batch, loss_fn=loss, micro_batches=MicroBatchSpec(num=4))
        results.append((result.success, result.grad_norm, result.learning_rate, result.loss_scale))
    # At once, while the last step's results may still be on their way.
    continued = engine.generate([documents[0].tolist()], SamplingParams(max_new_tokens=5, temperature=0.0))
    found = {
        "results": results,
        "continued": [answer.tokens for answer in continued],
        "evaluated": engine.evaluate([batch]),
        "weights": {name: p.detach().clone() for name, p in engine.parameters().items()},
        "bytes": engine.trainer.optimizer.state_bytes,
    }
    engine.close()
    engine.grid.close()
    return found


def on_and_off(rank: int, cases: list[Case]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(trained(case, True), trained(case, False)) for case in cases]


@pytest.mark.shows(91, 92, 93, 94)
@pytest.mark.parametrize("world", CASES)
def test_sharing_the_step_out_changes_bytes_alone(world: int) -> None:
    by_rank = run_ranks(world, on_and_off, CASES[world], timeout_s=120.0)
    for index, case in enumerate(CASES[world]):
        num_owners = case.layout.dp * case.layout.cp
        exact = num_owners == 2  # two summands have one sum, whoever adds them
        for of_rank in by_rank:
            on, off = of_rank[index]
            assert [success for success, *_ in on["results"]] == [True, False, True]
            for mine, plain in zip(on["results"], off["results"], strict=True):
                assert mine == pytest.approx(plain, rel=1e-12, abs=0, nan_ok=True), case
            for name, weight in on["weights"].items():
                assert torch.equal(weight, by_rank[0][index][0]["weights"].get(name, weight))
                if exact:
                    assert torch.equal(weight, off["weights"][name]), (case, name)
                else:
                    assert (weight - off["weights"][name]).abs().max() < 1e-10, (case, name)
            assert on["continued"] == off["continued"] and len(on["continued"][0]) == 5
            assert on["evaluated"] == pytest.approx(off["evaluated"], rel=1e-10)
            # Shares are whole cache lines, so a small bucket's are longer than they need be.
            assert off["bytes"] <= on["bytes"] * num_owners <= off["bytes"] * 1.1


def test_a_rank_alone_steps_everything() -> None:
    alone = Case(Layout(), Precision.BF16)
    on, off = trained(alone, True), trained(alone, False)
    assert all(torch.equal(weight, off["weights"][name]) for name, weight in on["weights"].items())
    assert on["bytes"] == off["bytes"]
