"""Ranks that hold the same part of the model must begin with the same values, or the first that differs is named."""

import pytest
import torch
from torch import nn

from penstock import Engine, Layout, OptimizerConfig
from penstock.settings import ParameterGroup
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 16


class Noise(nn.Module):
    """Has a random table as a buffer, and a mask: values of one byte."""

    table: torch.Tensor
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("kept", self.table > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table * self.kept


def error_of(engine_of: object) -> str:
    try:
        engine_of()  # type: ignore[operator]
    except ValueError as error:
        return str(error)
    return ""


def begin(rank: int) -> dict[str, str]:
    def layers(seeds: tuple[int, int, int]) -> list[nn.Module]:
        made: list[nn.Module] = []
        for seed, make in zip(
            seeds,
            (lambda: nn.Embedding(VOCAB, WIDTH), lambda: nn.Sequential(Noise(), nn.ReLU()), lambda: nn.Linear(8, 16)),
            strict=True,
        ):
            torch.manual_seed(seed)
            made.append(make())
        return made

    dp, found = Layout(dp=2), {}
    mine = rank + 1
    found["none"] = error_of(lambda: Engine.from_layers(layers((0, 0, 0)), WIDTH, dp))
    found["parameter"] = error_of(lambda: Engine.from_layers(layers((0, 0, mine)), WIDTH, dp))
    found["buffer"] = error_of(lambda: Engine.from_layers(layers((0, mine, 0)), WIDTH, dp))
    found["scoring"] = error_of(lambda: Engine.from_layers(layers((mine, 0, 0)), WIDTH, dp, learns=False))
    # Stages of one pipeline are no replicas, and another stage's parameters are the model's, too.
    group = OptimizerConfig(groups=(ParameterGroup("layers.2.bias", frozen=True),))
    found["stages"] = error_of(
        lambda: Engine.from_layers(layers((mine, mine, mine)), WIDTH, Layout(pp=2), optimizer=group)
    )
    return found


@pytest.mark.shows(113)
def test_replicas_with_other_weights_are_refused_on_all_ranks_by_the_first_tensor() -> None:
    first, second = run_ranks(2, begin)
    assert first == second
    assert first["none"] == first["stages"] == ""
    for kind, name in {
        "parameter": "layers.2.weight",
        "buffer": "layers.1.0.table",
        "scoring": "layers.0.weight",
    }.items():
        assert first[kind].startswith(f"{name} begins with other values on rank 1 than on rank 0")
