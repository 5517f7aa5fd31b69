"""A parameter that several of a user's own layers hold stays one, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.settings import ScheduleConfig
from tests.dist.launch import run_ranks

WIDTH, VOCAB, STEPS = 8, 32, 3
ADAMW = partial(torch.optim.AdamW, lr=0.05)
LAYOUTS = [Layout(), Layout(pp=2), Layout(dp=2)]
BATCH = PackedBatch.from_documents(
    [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 3, 7, 4, 6, 8)]
)


def head_of_embedding() -> list[nn.Module]:
    """The last layer multiplies by the embedding's weight, and has a bias of its own."""
    torch.manual_seed(1)
    layers = [nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)]
    layers[2].weight = layers[0].weight
    return layers


def one_layer_twice() -> list[nn.Module]:
    torch.manual_seed(2)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return [nn.Embedding(VOCAB, WIDTH), block, nn.LayerNorm(WIDTH), block, nn.Linear(WIDTH, VOCAB)]


def one_layer_three_times() -> list[nn.Module]:
    """With two stages the first has the owner of the block's parameters, and the second two copies of each."""
    layers = one_layer_twice()
    return [*layers[:4], nn.LayerNorm(WIDTH), layers[1], layers[4]]


def one_module_in_two_layers() -> list[nn.Module]:
    """Neither layer is the other."""
    layers = one_layer_twice()
    return [*layers[:3], nn.Sequential(nn.Tanh(), layers[1][0]), layers[4]]  # pyright: ignore[reportIndexIssue]


def train(rank: int, make: Callable[[], list[nn.Module]], layout: Layout, **options: Any) -> list[float]:
    engine = Engine.from_layers(make(), WIDTH, layout, optimizer=partial(torch.optim.SGD, lr=0.5), **options)
    losses = [engine.train_batch(BATCH, micro_batches=MicroBatchSpec(num=3)).loss for _ in range(STEPS)]
    engine.close()
    return losses


def cut_in_three(rank: int, cut: tuple[int, ...]) -> list[float] | str:
    try:
        return train(rank, one_layer_twice, Layout(pp=3), schedule=ScheduleConfig(cut=cut))
    except ValueError as error:
        return str(error)


Values = dict[str, list[list[float]]]


def values_of(engine: Engine) -> Values:
    """The values of each tied parameter on this rank, by the name of its owner: its own and those of its copies."""
    found: Values = {}
    for name, parameter in engine.parameters().items():
        owner = engine.ties.get(name, name)
        if owner in engine.ties.values():
            found.setdefault(owner, []).append(parameter.flatten().tolist())
    return found


def copies_after(rank: int, schedule: ScheduleConfig, folder: Path) -> dict[str, Values]:
    """The tied parameters once they have been stepped, sent to another engine, and loaded by a third."""
    engines = [
        Engine.from_layers(
            one_layer_three_times(), WIDTH, Layout(pp=2), schedule=schedule, optimizer=ADAMW, learns=learns
        )
        for learns in (True, False, True)
    ]
    trained, receiving, loading = engines
    found = {"built": values_of(trained)}
    for _ in range(STEPS):
        trained.train_batch(BATCH, micro_batches=MicroBatchSpec(num=4))
    found["stepped"] = values_of(trained)
    trained.send_weights(receiving)
    found["sent"] = values_of(receiving)
    trained.save(folder)
    loading.load(folder)
    found["loaded"] = values_of(loading)
    for engine in engines:
        engine.close()
    return found


def plainly(layers: list[nn.Module]) -> list[float]:
    """The same in PyTorch alone."""
    model = nn.Sequential(*layers)
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        loss = loss_of(model)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses


def loss_of(model: nn.Module) -> Tensor:
    labels, output = BATCH["labels"], model(BATCH["tokens"])
    return F.cross_entropy(output, labels, ignore_index=-100)


MODELS = (head_of_embedding, one_layer_twice, one_layer_three_times, one_module_in_two_layers)


def train_all(rank: int, layout: Layout) -> list[list[float]]:
    return [train(rank, make, layout) for make in MODELS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layers_that_share_a_parameter_learn_as_in_pytorch(layout: Layout) -> None:
    first, *others = run_ranks(layout.world_size, train_all, layout)
    assert all(other == first for other in others)
    for make, losses in zip(MODELS, first, strict=True):
        assert losses == pytest.approx(plainly(make()), rel=1e-5)
        assert losses[2] < losses[0]


@pytest.mark.parametrize(
    "schedule",
    [ScheduleConfig(cut=(3, 4)), ScheduleConfig("interleaved", 2, cut=(3, 1, 1, 2)), ScheduleConfig("dualpipe", 2)],
    ids=lambda schedule: schedule.name,
)
def test_every_copy_has_the_owners_values_once_they_were_stepped_sent_or_loaded(
    schedule: ScheduleConfig, tmp_path: Path
) -> None:
    by_rank = run_ranks(2, copies_after, schedule, tmp_path)
    for when in ("built", "stepped", "sent", "loaded"):
        everywhere = [of_rank[when] for of_rank in by_rank]
        # With two directions every parameter has copies.
        for owner in ("layers.1.0.weight", "layers.1.0.bias"):
            copies = [copy for values in everywhere for copy in values[owner]]
            assert len(copies) == (6 if schedule.name == "dualpipe" else 3)
            assert all(copy == copies[0] for copy in copies), (when, owner)
            assert (copies[0] == by_rank[0]["stepped"][owner][0]) == (when != "built")


def test_of_more_ranks_one_and_its_mirror_may_share_a_parameter() -> None:
    for losses in run_ranks(3, cut_in_three, (2, 1, 2)):
        assert losses == pytest.approx(plainly(one_layer_twice()), rel=1e-5)
    for refused in run_ranks(3, cut_in_three, (2, 2, 1)):
        assert refused.startswith("layers.1.0.weight is shared by layers on the ranks 0, 1; a weight can be shared by")


def test_a_layer_with_buffers_is_not_given_twice() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with pytest.raises(ValueError, match="layer 2 is layer 1 again, with buffers; give two modules"):
        Engine.from_layers([nn.Embedding(VOCAB, WIDTH), layer, layer], WIDTH)


def test_a_layer_with_buffers_may_share_a_weight() -> None:
    layers = head_of_embedding()
    layers[-1].register_buffer("seen", torch.zeros(1))
    assert Engine.from_layers(layers, WIDTH).ties == {"layers.2.weight": "layers.0.weight"}
