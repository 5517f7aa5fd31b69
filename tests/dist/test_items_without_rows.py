"""Items without a row of some key, texts without images say, train in every layout as in a plain loop of PyTorch."""

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, LearningRate, MicroBatchSpec, OptimizerConfig, PackedBatch
from penstock.model import cross_entropy_sum
from penstock.settings import OptimizerName, WeightDecay
from tests.dist.launch import run_ranks

WIDTH, VOCAB, IMAGE = 8, 16, 3
TOKENS = [[5, 6, 7], [IMAGE, 1, IMAGE, 2], [4, 4], [1, 2, IMAGE], [9, 1], [8, 9]]
LABELS = [[6, 7, -100], [1, 5, 2, -100], [4, -100], [2, 3, -100], [1, -100], [9, -100]]


class Look(nn.Module):
    """Gives the stream, and a row per image."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patches = nn.Embedding(VOCAB, WIDTH), nn.Conv2d(1, WIDTH, 4, 4)

    def forward(self, tokens: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(tokens), self.patches(images).flatten(1)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.seen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.words(x), seen + self.seen(seen)


class Join(nn.Module):
    def forward(self, x: Tensor, seen: Tensor, tokens: Tensor) -> Tensor:
        return x.masked_scatter((tokens == IMAGE)[:, None], seen)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Look(), Both(), Join(), nn.Linear(WIDTH, VOCAB)]


def batch() -> PackedBatch:
    two, one = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)).split([2, 1])
    images = [[], two, [], one, [], []]
    return PackedBatch.from_sequences({"tokens": TOKENS, "labels": LABELS, "images": images})


def plain() -> list[float]:
    look, both, join, head = model = nn.ModuleList(layers())
    optimizer, given, losses = torch.optim.SGD(model.parameters(), 0.1), batch(), []
    for _ in range(3):
        x, seen = both(*look(given["tokens"], given["images"]))
        loss = cross_entropy_sum(head(join(x, seen, given["tokens"])), given["labels"])
        loss = loss / int((given["labels"] >= 0).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train(rank: int, layout: Layout, schedule: str) -> list[float]:
    optimizer = OptimizerConfig(LearningRate(0.1), name=OptimizerName.SGD, weight_decay=WeightDecay(0.0), clip_norm=0.0)
    engine = Engine.from_layers(layers(), WIDTH, layout, schedule=schedule, optimizer=optimizer, device="cpu")
    own = batch().split_with([3, 3])[engine.grid.dp_rank] if layout.dp > 1 else batch()
    # One item a microbatch: some have no image at all.
    spec = MicroBatchSpec(num=own.num_items)
    losses = [engine.train_batch(own, micro_batches=spec).loss for _ in range(3)]
    engine.close()
    engine.grid.close()
    return losses


@pytest.mark.shows(103)
@pytest.mark.parametrize(
    "layout, schedule",
    [(Layout(), "1f1b"), (Layout(pp=4), "zb-h1"), (Layout(pp=2, dp=2), "1f1b")],
    ids=str,
)
def test_items_without_images_train_as_in_a_plain_loop(layout: Layout, schedule: str) -> None:
    args = layout, schedule
    ranks = [train(0, *args)] if layout.world_size == 1 else run_ranks(layout.world_size, train, *args)
    for losses in ranks:
        torch.testing.assert_close(losses, plain(), rtol=1e-5, atol=0)
