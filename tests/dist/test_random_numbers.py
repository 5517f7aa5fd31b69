"""Random numbers outside of training: layers and hooks that draw them give the same in every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, PerToken
from penstock.engine.training.loss import token_cross_entropy
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 16


class Noisy(nn.Linear):
    """A layer that draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(len(x), WIDTH)


def noisy_loss(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return token_cross_entropy(logits + torch.rand_like(logits), microbatch)


def drawn(rank: int, layout: Layout, from_iterator: bool) -> tuple[float, list[float], Any]:
    """Losses and hooks' results of an evaluation and of a scoring, and where the generator is afterwards."""
    torch.manual_seed(3)
    layers = [nn.Embedding(VOCAB, WIDTH), *(Noisy(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, VOCAB)]
    engine = Engine.from_layers(layers, WIDTH, layout, timeout_s=60.0)
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randint(VOCAB, (length,), generator=generator) for length in (5, 3, 6, 4)]
    batch, spec = PackedBatch.from_documents(documents), MicroBatchSpec(num=2)
    parts = (PackedBatch.from_documents(documents[2 * part : 2 * part + 2]) for part in range(2))
    torch.manual_seed(5 + rank)
    loss = engine.evaluate([parts] if from_iterator else batch, noisy_loss, micro_batches=spec)
    hook = PerToken(lambda logits, _: logits.sum(-1) + torch.rand(len(logits)))
    scores = engine.forward(batch, hook, micro_batches=spec, broadcast=True)
    stays = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5 + rank).get_state())
    engine.close()
    return float(loss), scores.tolist(), stays


@pytest.mark.shows(199)
@pytest.mark.parametrize("from_iterator", [False, True], ids=["a batch", "an iterator"])
def test_what_layers_and_hooks_draw_outside_of_training_depends_on_no_layout(from_iterator: bool) -> None:
    (loss, scores, stays), *_ = run_ranks(1, drawn, Layout(), from_iterator)
    assert stays and len(set(scores)) == len(scores)
    for layout in (Layout(pp=2), Layout(pp=4)):
        assert run_ranks(layout.world_size, drawn, layout, from_iterator) == [(loss, scores, True)] * layout.world_size
