"""Stages that hold no unit, and stages on any ranks: what layers give each other passes them, whatever is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions, GenerateOptions
from penstock.model import decoder_units
from penstock.settings import ModelConfig, SamplingParams, ScheduleConfig
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 32


class Gives(nn.Module):
    """Gives rows, whole numbers without a gradient, and numbers with one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.inner(tokens)
        return x.clone(), tokens % 3, x.square().sum(-1)


class Takes(nn.Module):
    """Changes in place what it is given alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, classes: Tensor, norms: Tensor) -> Tensor:
        return self.inner(x.add_(1.0) * norms[:, None]) + classes[:, None]


def train(rank: int, pp: int, schedule: ScheduleConfig) -> tuple[list[float], dict[str, Tensor], float]:
    torch.manual_seed(0)
    engine = Engine.from_layers([Gives(), Takes()], WIDTH, Layout(pp=pp), EngineOptions(schedule, device="cpu"))
    batch = PackedBatch.from_documents([torch.arange(n) % VOCAB for n in (5, 9, 4, 7, 6, 8)])
    spec = MicroBatchSpec(num=6)
    losses = [engine.train_batch(batch, micro_batches=spec).loss for _ in range(2)]
    scored = float(engine.evaluate([batch], micro_batches=spec))
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    engine.close()
    return losses, weights, scored


@pytest.mark.shows(185, 186)
@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        (2, ScheduleConfig("interleaved", 2, cut=(1, 0, 0, 1))),
        (2, ScheduleConfig("zb-v", cut=(1, 0, 0, 1))),
        (3, ScheduleConfig("1f1b", cut=(1, 0, 1))),
        (3, ScheduleConfig("auto", cut=(1, 0, 0, 0, 1), placement=(1, 0, 1, 2, 0))),
    ],
    ids=["interleaved", "zb-v", "1f1b", "map"],
)
def test_several_tensors_pass_them_with_their_gradients(pp: int, schedule: ScheduleConfig) -> None:
    losses, weights, scored = train(0, 1, ScheduleConfig("1f1b"))
    for theirs in run_ranks(pp, train, pp, schedule):
        assert theirs[0] == losses and theirs[2] == scored
        assert all(torch.equal(own, weights[name]) for name, own in theirs[1].items())


def generate(rank: int, pp: int, schedule: ScheduleConfig) -> Any:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1
    )
    engine = Engine(decoder_units(config), 16, Layout(pp=pp), EngineOptions(schedule, device="cpu"))
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = SamplingParams(max_new_tokens=5, temperature=0.8)
    answers = engine.generate(prompts, params, options=GenerateOptions(num_slots=2, rows_per_slot=2))
    found = [list(answer.tokens) for answer in answers]
    engine.close()
    engine.grid.close()
    return found


@pytest.mark.shows(185, 186)
@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        (3, ScheduleConfig("1f1b", cut=(3, 0, 3))),
        (4, ScheduleConfig("1f1b", cut=(1, 0, 0, 5))),
        (3, ScheduleConfig("auto", placement=(0, 2, 2, 1, 0))),
    ],
    ids=["3", "4", "map"],
)
def test_tokens_pass_them(pp: int, schedule: ScheduleConfig) -> None:
    alone = generate(0, 1, ScheduleConfig())
    assert all(answers == alone for answers in run_ranks(pp, generate, pp, schedule))


def generate_refused(rank: int) -> str:
    with pytest.raises(ValueError) as caught:
        generate(rank, 2, ScheduleConfig("auto", placement=(1, 0)))
    return str(caught.value)


def test_generation_says_where_it_begins() -> None:
    for said in run_ranks(2, generate_refused):
        assert "generation begins on pipeline rank 0, but the schedule places the first stage on rank 1" in said
