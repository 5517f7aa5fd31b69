"""Microbatches: their number where none is given, with the bits of a plain loop in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, PackedBatch
from penstock.data import split
from penstock.engine import num_loss_tokens, token_cross_entropy
from penstock.settings import TrainConfig
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 32
DOCS = Path(__file__).parents[2] / "docs"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(VOCAB, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCAB)]


def batch_of(num: int, seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (num,), generator=generator).tolist()
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths])


def plainly(microbatches: Sequence[PackedBatch], denominator: float | None = None) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a plain loop in one process."""
    model, losses = nn.Sequential(*layers()), []
    denominator = denominator or sum(map(num_loss_tokens, microbatches))
    for microbatch in microbatches:
        loss = token_cross_entropy(model(microbatch["tokens"]), microbatch) * (1.0 / denominator)
        loss.backward()
        losses.append(loss.detach())
    return float(torch.stack(losses).sum()), {name: own.grad.tolist() for name, own in model.named_parameters()}


def gradients_of(engine: Engine) -> dict[str, Any]:
    return {name.removeprefix("layers."): engine.gradient(name).tolist() for name in engine.parameters()}


def options_of(schedule: str) -> EngineOptions:
    return EngineOptions(schedule, timeout_s=30.0, device="cpu")


# ---- their number where none is given


NUMS = (19, 5)


def left_out(rank: int, pp: int) -> list[Any]:
    """Of each batch: loss and gradients of a step, then the loss of an evaluation, and scores."""
    engine = Engine.from_layers(layers(), WIDTH, Layout(pp=pp), options_of("1f1b"), optimizer="sgd")
    engine.evaluate([batch_of(3)])
    found = []
    for num in NUMS:
        # Before any step has changed the weights.
        scores = engine.forward(batch_of(num), lambda logits, m: logits.sum(), list, broadcast=True)
        found += [float(engine.evaluate([batch_of(num)])), [float(score) for score in scores]]
    taken = engine.train_batch(batch_of(NUMS[0]))
    return [*found, taken.num_microbatches, taken.loss, gradients_of(engine)]


@pytest.mark.shows(177)
def test_as_many_where_none_is_given_whatever_the_layout() -> None:
    default = TrainConfig().num_microbatches
    wanted = left_out(0, 1)
    parts = split(batch_of(NUMS[0]), MicroBatchSpec(num=default)).microbatches
    loss, gradients = plainly(parts)
    assert wanted[-3:] == [default, loss, gradients] and len(wanted[1]) == default and len(wanted[3]) == NUMS[1]
    for pp in (2, 3):
        by_rank = run_ranks(pp, left_out, pp)
        assert [own[:-1] for own in by_rank] == [wanted[:-1]] * pp
        assert {name: own for found in by_rank for name, own in found[-1].items()} == gradients


@pytest.mark.shows(177)
def test_the_pages_say_this_number() -> None:
    default = TrainConfig().num_microbatches
    assert f"left out, {default} in any layout" in " ".join((Engine.train_batch.__doc__ or "").split())
    sentences = {
        "how/reproducibility.md": f"which is {default} in every layout where it is not given",
        "tutorials/own_layers.md": f"Where `micro_batches` is not given there are {default}",
        "promises.md": f"where their number is not given it is {default} in each",
    }
    for page, sentence in sentences.items():
        assert sentence in (DOCS / page).read_text()
