"""Layers of a user's own that are made on the rank that holds them, with weights that no layout changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.settings import OptimizerConfig
from tests.dist.launch import run_ranks

WIDTH, VOCAB, NUM_LAYERS = 8, 32, 6
MADE: list[int] = []


class Block(nn.Module):
    """Draws its weights, a buffer and a number from every generator, and writes down that it has values."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.number, self.scale = number, 0.5 + number / 10
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("table", torch.rand(width))
        self.wide = nn.Parameter(torch.ones(width, dtype=torch.float64))
        if not self.wide.is_meta:
            MADE.append(number)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x) * self.wide.to(x.dtype) + self.shift + self.table


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(()).item()


def layers() -> list[Any]:
    """Some of each kind: a module, and what makes one."""
    torch.manual_seed(3)
    blocks = [partial(Block, number) for number in range(NUM_LAYERS - 2)]
    return [nn.Embedding(VOCAB, WIDTH), *blocks, partial(nn.Linear, WIDTH, VOCAB)]


def train(rank: int, layout: Layout, changes: dict[str, Any]) -> dict[str, Any]:
    MADE.clear()
    given = layers()
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    engine = Engine.from_layers(given, WIDTH, layout, EngineOptions(device="cpu", seed=5, **changes))
    assert torch.equal(before, torch.get_rng_state())
    first = state_of(engine)
    tokens = torch.arange(24) % VOCAB
    batch = PackedBatch.from_documents(list(tokens.split(6)))
    losses = [engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4)).loss for _ in range(2)]
    held = {name for stage in engine.pipeline.model.stages.values() for name, _ in stage.units}
    found = {"losses": losses, "first": first, "state": state_of(engine), "held": held, "made": sorted(MADE)}
    engine.close()
    return found


def state_of(engine: Engine) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in (*engine.parameters().items(), *engine.buffers().items())}


@pytest.mark.shows(184)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(pp=2), {"schedule": "1f1b"}),
        (Layout(pp=3), {"schedule": "zb-v"}),
        (Layout(pp=2, dp=2), {"schedule": "1f1b", "optimizer": OptimizerConfig(zero=True), "recompute": "full"}),
        (Layout(pp=2), {"schedule": "dualpipe"}),
    ],
    ids=["1f1b", "zb-v", "ZeRO", "two copies"],
)  # fmt: skip
def test_each_is_made_once_where_it_is_held_with_the_weights_of_one_process(
    layout: Layout, changes: dict[str, Any], precision: str
) -> None:
    alone = train(0, Layout(), {"precision": precision})
    assert alone["made"] == list(range(NUM_LAYERS - 2))
    assert alone["state"]["layers.1.wide"].dtype is torch.float64
    alike = ["first", *(["state"] if layout.dp == 1 and changes["schedule"] != "dualpipe" else [])]
    for one in run_ranks(layout.world_size, train, layout, changes | {"precision": precision}):
        assert one["made"] == sorted(n - 1 for n in range(1, NUM_LAYERS - 1) if f"layers.{n}" in one["held"])
        for key in alike:
            assert all(torch.equal(own, alone[key][name.split("@")[0]]) for name, own in one[key].items())
        assert "state" not in alike or one["losses"] == alone["losses"]


REFUSED: list[tuple[Any, str]] = [
    (partial(NeedsValues), "layer 1 cannot be made without values by .*NeedsValues"),
    (partial(Block), "layer 1 cannot be made without values by .*missing 1 required positional argument"),
    (partial(nn.Sequential, nn.Linear(WIDTH, WIDTH)), "layer 1 is made on the rank that holds it, but its '0.weight'"),
    (partial(dict, a=1), "layer 1 is a dict"),
]


@pytest.mark.parametrize(("maker", "message"), REFUSED)
def test_what_cannot_be_made_so_is_refused_by_its_number(maker: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_layers([nn.Embedding(VOCAB, WIDTH), maker], WIDTH)
