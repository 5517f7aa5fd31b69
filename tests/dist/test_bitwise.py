"""With pipeline parallelism alone, any schedule gives bit for bit what one process gives.

The reference is a plain loop of its own: the model's units called one after the other, autograd, gradients added up
microbatch by microbatch, clipping and `torch.optim.AdamW` parameter by parameter. Only units and loss are shared.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.data import NO_LABEL, split
from penstock.engine import Engine, EngineOptions
from penstock.engine.learning_rate import LearningRate, WeightDecay
from penstock.engine.optimizer import OptimizerConfig
from penstock.model import ModelConfig, Sequences, cross_entropy_sum, decoder_units
from tests.dist.launch import run_ranks

STEPS = 3
# Small enough that every step is clipped, so that the norm decides bits.
CLIP = 0.5
RATE, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Case:
    schedule: str
    num_microbatches: int
    recompute: str
    tied: bool

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=48,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            tie_embeddings=self.tied,
        )


CASES = [
    Case(schedule, m, recompute, tied)
    for schedule, m, recompute, tied in itertools.product(
        ("afab", "1f1b"), (1, 2, 3, 5, 8), ("none", "full"), (False, True)
    )
]


def batches(num_microbatches: int) -> list[PackedBatch]:
    """A batch a step, of unequal lengths."""
    generator = torch.Generator().manual_seed(num_microbatches)
    found = []
    for _ in range(STEPS):
        lengths = torch.randint(2, 14, (num_microbatches + 2,), generator=generator).tolist()
        found.append(PackedBatch.from_documents([torch.randint(0, 48, (n,), generator=generator) for n in lengths]))
    return found


def engine_run(case: Case, pp: int) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, the last step's gradients and the final weights of this rank."""
    optimizer = OptimizerConfig(LearningRate(RATE), WeightDecay(DECAY), BETAS, EPS, CLIP)
    options = EngineOptions(schedule=case.schedule, recompute=case.recompute, optimizer=optimizer, timeout_s=30.0)
    config = case.config()
    engine = Engine(decoder_units(config), config.hidden_size, Layout(pp=pp), options)
    results = [
        engine.train_batch(batch, micro_batches=MicroBatchSpec(num=case.num_microbatches))
        for batch in batches(case.num_microbatches)
    ]
    gradients = {name: engine.gradient(name).clone() for name in engine.parameters()}
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    assert engine.transport.num_pending() == 0
    engine.close()
    return [r.loss for r in results], [r.grad_norm for r in results], gradients, weights


def all_cases(rank: int, pp: int) -> list[tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]]:
    return [engine_run(case, pp) for case in CASES]


class Reference:
    """One process: units in a row, one loop over microbatches, one optimizer over parameters."""

    def __init__(self, case: Case) -> None:
        units = decoder_units(case.config())
        self.modules = [(unit.name, unit.build()) for unit in units]
        for unit, (_, module) in zip(units, self.modules, strict=True):
            unit.initialise(module, 0)
        self.parameters: dict[str, nn.Parameter] = {
            f"{name}.{p}": value for name, module in self.modules for p, value in module.named_parameters()
        }
        self.ties = {f"{u.name}.{own}": owner for u in units for own, owner in u.tied.items()}
        decayed = [p for p in self.parameters.values() if p.dim() > 1]
        plain = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)

    def gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None
        return gradient

    def step(self, batch: PackedBatch, num_microbatches: int) -> tuple[float, float]:
        self.adamw.zero_grad()
        microbatches = split(batch, MicroBatchSpec(num=num_microbatches)).microbatches
        weight = float(sum((m["labels"] != NO_LABEL).sum() for m in microbatches))
        losses = []
        for microbatch in microbatches:
            h, sequences = microbatch["tokens"], Sequences.from_lengths(microbatch.sequence_lengths())
            for _, module in self.modules:
                h = module(h, sequences)
            loss = cross_entropy_sum(h, microbatch["labels"]) * (1.0 / weight)
            loss.backward()
            losses.append(loss.detach())
        for copy, owner in self.ties.items():
            both = self.gradient(owner) + self.gradient(copy)
            self.parameters[owner].grad, self.parameters[copy].grad = both, both.clone()
        norms = [
            float(torch.linalg.vector_norm(self.gradient(name), dtype=torch.float64))
            for name in self.parameters
            if name not in self.ties
        ]
        norm = math.sqrt(math.fsum(n * n for n in norms))
        factor = min(1.0, CLIP / (norm + 1e-6))
        for name in self.parameters:
            self.gradient(name).mul_(factor)
        self.adamw.step()
        return float(torch.stack(losses).sum()), norm


@pytest.mark.shows(4, 20, 21, 29, 89, 90, 93)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_any_cut_and_schedule_gives_the_bits_of_one_process(pp: int) -> None:
    by_rank = run_ranks(pp, all_cases, pp, timeout_s=100.0)
    for number, case in enumerate(CASES):
        reference = Reference(case)
        expected = [reference.step(batch, case.num_microbatches) for batch in batches(case.num_microbatches)]
        seen: set[str] = set()
        for rank in range(pp):
            losses, norms, gradients, weights = by_rank[rank][number]
            assert losses == [loss for loss, _ in expected], (case, rank)
            assert norms == [norm for _, norm in expected], (case, rank)
            assert min(norms) > CLIP, "a case that is never clipped shows nothing of the norm"
            for name, parameter in weights.items():
                assert torch.equal(gradients[name], reference.gradient(name)), (case, rank, name)
                assert torch.equal(parameter, reference.parameters[name]), (case, rank, name)
            seen |= weights.keys()
        assert seen == reference.parameters.keys()
