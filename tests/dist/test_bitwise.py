"""With pipeline parallelism alone, any schedule gives bit for bit what one process gives.

The reference is a plain loop of its own: the model's units called one after the other, autograd, gradients added up
microbatch by microbatch, clipping and `torch.optim.AdamW` parameter by parameter. Only units and loss are shared.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.data import NO_LABEL, labelled_part, split
from penstock.engine import Engine, EngineOptions
from penstock.engine.sharding import SECOND_COPY
from penstock.model import Sequences, cross_entropy_sum, decoder_units
from penstock.schedule import names
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig, ScheduleConfig, WeightDecay
from tests.covering import EVERY, pairs_of
from tests.dist.launch import run_ranks

STEPS = 2
# Small enough that every step is clipped, so that the norm decides bits.
CLIP = 0.5
RATE, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class Case:
    schedule: str
    num_microbatches: int
    recompute: str | tuple[int, ...]
    tied: bool
    cut: tuple[int, ...] | None = None
    placement: tuple[int, ...] | None = None
    num_kept: int = 0

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


# By the number of ranks.
CASES: dict[int, list[Case]] = {}
for pp, m, *ways in pairs_of((1, 2, 3, 4), (1, 2, 3, 5, 8), ("afab", "1f1b"), ("none", "full"), (False, True)):
    CASES.setdefault(pp, []).append(Case(ways[0], m, *ways[1:]))

FAMILY: dict[int, list[Case]] = {}
OTHERS = [name for name in names() if name not in ("afab", "1f1b", "inference")]
for pp, schedule, ways in pairs_of((2, 3, 4), OTHERS, ((1, "none", True), (5, "none", False), (8, "full", True))):
    # Each schedule on three ranks, and on two or on four.
    if EVERY or pp == 3 or pp == 2 + 2 * (OTHERS.index(schedule) % 2):
        FAMILY.setdefault(pp, []).append(Case(schedule, *ways))


def batches(num_microbatches: int) -> list[PackedBatch]:
    """A batch a step, of unequal lengths."""
    generator = torch.Generator().manual_seed(num_microbatches)
    found = []
    for _ in range(STEPS):
        lengths = torch.randint(2, 14, (num_microbatches + 2,), generator=generator).tolist()
        found.append(PackedBatch.from_documents([torch.randint(0, 48, (n,), generator=generator) for n in lengths]))
    return found


Outcome = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]


def engine_run(case: Case, pp: int) -> Outcome:
    """Losses, norms, the last step's gradients and the final weights of this rank."""
    optimizer = OptimizerConfig(LearningRate(RATE), *BETAS, EPS, WeightDecay(DECAY), CLIP)
    schedule = ScheduleConfig(case.schedule, cut=case.cut, placement=case.placement)
    options = EngineOptions(
        schedule,
        recompute=case.recompute,
        num_kept_microbatches=case.num_kept,
        optimizer=optimizer,
        timeout_s=30.0,
    )
    config = case.config()
    engine = Engine(decoder_units(config), config.hidden_size, Layout(pp=pp), options)
    results = [
        engine.train_batch(batch, micro_batches=MicroBatchSpec(num=case.num_microbatches))
        for batch in batches(case.num_microbatches)
    ]
    gradients = {name: engine.gradient(name).clone() for name in engine.parameters()}
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    assert engine.pipeline.transport.num_pending() == 0
    engine.close()
    engine.grid.close()
    return [r.loss for r in results], [r.grad_norm for r in results], gradients, weights


def run_cases(rank: int, cases: list[Case], pp: int) -> list[Outcome]:
    return [engine_run(case, pp) for case in cases]


class Reference:
    """One process: units in a row, one loop over microbatches, one optimizer over parameters."""

    def __init__(self, config: ModelConfig) -> None:
        units = decoder_units(config)
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

    def step(self, batch: PackedBatch, num_microbatches: int, num_directions: int) -> tuple[float, float]:
        microbatches = split(batch, MicroBatchSpec(num=num_microbatches)).microbatches
        weight = float(sum((m["labels"] != NO_LABEL).sum() for m in microbatches))
        share = -(-num_microbatches // num_directions)
        losses, gradients = [], []
        for first in range(0, num_directions * share, share):
            loss, found = self.backward(microbatches[first : first + share], weight)
            losses.append(loss)
            gradients.append(found)
        for name, parameter in self.parameters.items():
            # The directions of a bidirectional pipeline are summed apart, then added.
            parameter.grad = sum(found[name] for found in gradients[1:]) + gradients[0][name]
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
        return sum(losses), norm

    def backward(self, microbatches: Sequence[PackedBatch], weight: float) -> tuple[float, dict[str, Tensor]]:
        """The loss of these microbatches and its gradients, added up in their order."""
        self.adamw.zero_grad()
        losses = []
        for microbatch in microbatches:
            read, rows = labelled_part(microbatch)
            h, sequences = microbatch["tokens"], Sequences.from_lengths(microbatch.sequence_lengths())
            for number, (_, module) in enumerate(self.modules):
                if rows is not None and number == len(self.modules) - 1:
                    h = h[rows]
                h = module(h, sequences)
            loss = cross_entropy_sum(h, read["labels"]) * (1.0 / weight)
            loss.backward()
            losses.append(loss.detach())
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in self.parameters.items()
        }
        return float(torch.stack(losses).sum()) if losses else 0.0, gradients


@functools.cache
def trained_alone(
    config: ModelConfig, num_microbatches: int, num_directions: int
) -> tuple[Reference, list[tuple[float, float]]]:
    """The reference after all steps, and each step's loss and norm; neither schedule nor recompute has a say in it."""
    reference = Reference(config)
    return reference, [reference.step(batch, num_microbatches, num_directions) for batch in batches(num_microbatches)]


def check(cases: list[Case], pp: int) -> None:
    by_rank = run_ranks(pp, run_cases, cases, pp, timeout_s=170.0)
    for number, case in enumerate(cases):
        directions = 2 if case.schedule == "dualpipe" else 1
        reference, expected = trained_alone(case.config(), case.num_microbatches, directions)
        seen: set[str] = set()
        for rank in range(pp):
            losses, norms, gradients, weights = by_rank[rank][number]
            assert losses == [loss for loss, _ in expected], (case, rank)
            assert norms == [norm for _, norm in expected], (case, rank)
            assert min(norms) > CLIP, "a case that is never clipped shows nothing of the norm"
            for held, parameter in weights.items():
                name = held.removesuffix(SECOND_COPY)
                assert torch.equal(gradients[held], reference.gradient(name)), (case, rank, held)
                assert torch.equal(parameter, reference.parameters[name]), (case, rank, held)
                seen.add(name)
        assert seen == reference.parameters.keys()


@pytest.mark.shows(4, 20, 21, 29, 89, 90, 93)
@pytest.mark.parametrize("pp", CASES)
def test_any_cut_gives_the_bits_of_one_process(pp: int) -> None:
    check(CASES[pp], pp)


@pytest.mark.shows(4, 7, 11, 20, 54)
@pytest.mark.parametrize("pp", FAMILY)
def test_any_schedule_gives_the_bits_of_one_process(pp: int) -> None:
    check(FAMILY[pp], pp)


EMPTY = {
    2: [
        Case("interleaved", 4, "none", True, (3, 0, 0, 5)),
        Case("zb-v", 5, "full", False, (2, 0, 5, 1)),
    ],
    3: [
        Case("1f1b", 5, "full", True, (4, 0, 4)),
        Case("zb-h1", 3, "none", False, (7, 0, 1)),
        Case("interleaved", 6, "none", False, (2, 0, 3, 0, 0, 3)),
        Case("combined-1f1b", 6, "none", True, (1, 0, 7)),
        Case("zb-v", 6, "none", True, (1, 0, 0, 0, 0, 7)),
    ],
    4: [Case("dualpipe", 8, "none", True, (3, 0, 0, 5))],
}


@pytest.mark.shows(185)
@pytest.mark.parametrize("pp", EMPTY)
def test_a_stage_without_units_hands_on_what_it_is_given(pp: int) -> None:
    check(EMPTY[pp], pp)


MAPS = {
    2: [
        Case("auto", 4, "none", True, placement=(1, 0, 0, 1, 0)),
        Case("auto", 3, "full", False, (2, 5, 1), placement=(0, 0, 1)),
    ],
    3: [
        Case("auto", 6, "none", True, placement=(2, 0, 1, 0)),
        Case("auto", 4, "none", False, (1, 2, 0, 2, 3), placement=(1, 0, 2, 2, 1)),
    ],
}


@pytest.mark.shows(54, 186)
@pytest.mark.parametrize("pp", MAPS)
def test_any_map_from_stages_to_ranks_gives_the_bits_of_one_process(pp: int) -> None:
    check(MAPS[pp], pp)


KEPT = {
    2: [
        Case("1f1b", 5, "full", True, num_kept=1),
        Case("interleaved", 4, (0, 2), False, num_kept=1),
        Case("zb-v", 5, "full", False, num_kept=2),
        Case("combined-1f1b", 5, "full", True, num_kept=1),
    ],
    3: [
        Case("1f1b", 8, "full", False, num_kept=2),
        Case("interleaved", 6, "full", True, num_kept=1),
        Case("zb-v", 6, "full", True, num_kept=1),
        Case("zb-h1", 5, (1,), False, num_kept=1),
        Case("combined-1f1b", 6, "full", False, num_kept=2),
    ],
}


@pytest.mark.shows(20, 29, 188)
@pytest.mark.parametrize("pp", KEPT)
def test_microbatches_that_keep_all_among_others_that_do_not_give_the_bits_of_one_process(pp: int) -> None:
    check(KEPT[pp], pp)
