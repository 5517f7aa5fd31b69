"""Groups without a parameter, models with nothing to train and unknown optimizers are refused by name."""

import pytest
import torch
from torch import nn

from penstock import ConfigError, Engine, OptimizerConfig, PackedBatch
from penstock.settings import OptimizerName, ParameterGroup


def engine(*groups: ParameterGroup) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)]
    return Engine.from_layers(layers, 8, optimizer=OptimizerConfig(groups=groups))


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            ParameterGroup("*.norm.*", weight_decay=0.0),
            r"'\*\.norm\.\*' matches no parameter of the model; among its 5",
        ),
        (ParameterGroup("*.bias", matrices=True), r"'\*\.bias' matches no matrix of the model; .* layers.0.weight, "),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_some_names(group: ParameterGroup, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(ParameterGroup("layers.0.*", frozen=True), group)


def test_a_model_that_is_frozen_altogether_says_so_and_trains_once_thawed() -> None:
    frozen, batch = engine(ParameterGroup("*", frozen=True)), PackedBatch.from_documents([[1, 2, 3]])
    with pytest.raises(ValueError, match="all are frozen, so there is none to train"):
        frozen.train_batch(batch)
    assert frozen.forward(batch).shape == (3, 16)
    next(iter(frozen.parameters().values())).requires_grad_(True)
    assert frozen.train_batch(batch).success


@pytest.mark.parametrize("name", ["AdamW", "ADAMW", "adamw"])
def test_an_optimizer_is_known_in_any_capitals(name: str) -> None:
    assert OptimizerConfig.of(name).name is ParameterGroup("*", name=name).name is OptimizerName.ADAMW


@pytest.mark.parametrize(("name", "likely"), [("AdamWW", "adamw"), ("SDG", "sgd"), ("RMS_prop", "rmsprop")])
def test_an_unknown_optimizer_names_the_nearest(name: str, likely: str) -> None:
    with pytest.raises(ConfigError, match=f"= '{name}': expected .*; the nearest one is \"{likely}\""):
        OptimizerConfig.of(name)
    with pytest.raises(ConfigError, match=f"groups.name = '{name}': expected .*; the nearest one is \"{likely}\""):
        ParameterGroup("*", name=name)


def test_another_optimizer_for_a_group_is_refused_beside_a_factory_that_makes_all() -> None:
    frozen, named = ParameterGroup("*.norm", frozen=True), ParameterGroup("*.bias", name="muon")
    assert OptimizerConfig(factory=torch.optim.SGD, groups=(frozen,)).groups == (frozen,)
    with pytest.raises(ConfigError, match=r"'\*\.bias' asks for muon, but a factory makes the optimizer of all groups"):
        OptimizerConfig(factory=torch.optim.SGD, groups=(frozen, named))
