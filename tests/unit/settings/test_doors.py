"""What is left out means the same in Python, in a file and on the command line."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, EngineOptions, OptimizerConfig
from penstock.engine.folders.model_folder import HfFolder, open_folder
from penstock.settings import LearningRate, ModelConfig, OptimizerName, RunConfig
from penstock.settings.run import from_dict
from tests.hugging_face import make_model

MAKE: Any = partial(torch.optim.SGD, lr=0.5)


@pytest.mark.shows(205)
def test_a_factory_clips_where_it_is_said_and_a_name_to_the_norm_1_through_every_door() -> None:
    bare = [OptimizerConfig.of(MAKE), OptimizerConfig(factory=MAKE), EngineOptions(optimizer=MAKE).optimizer]
    assert all(config == bare[0] and config.clip_norm == 0 for config in bare)
    assert OptimizerConfig(factory=MAKE, clip_norm=1.0).clip_norm == 1, "given, though it is the usual one"
    named = [
        OptimizerConfig(),
        OptimizerConfig.of("adamw"),
        OptimizerConfig(name=OptimizerName.ADAMW),
        EngineOptions().optimizer,
    ]
    assert {config.clip_norm for config in (*named, RunConfig().optimizer)} == {1}


@pytest.mark.shows(205)
def test_a_learning_rate_is_constant_through_every_door() -> None:
    doors = [OptimizerConfig(), OptimizerConfig(LearningRate()), OptimizerConfig(1e-3), EngineOptions().optimizer]
    doors += [
        RunConfig().optimizer,
        from_dict({}).optimizer,
        from_dict({"optimizer": {"learning_rate": 1e-3}}).optimizer,
    ]
    assert {config.learning_rate for config in doors} == {LearningRate(1e-3)}
    assert RunConfig().optimizer == OptimizerConfig()


@pytest.mark.shows(205)
def test_a_models_own_layers_are_those_that_know_it_through_every_door(tmp_path: Path) -> None:
    for door in (Engine.from_hf, open_folder):
        assert inspect.signature(door).parameters["native"].default == "auto"
    assert HfFolder(tmp_path).native == ModelConfig().native == from_dict({}).model.native == "auto"
    make_model("gpt2").save_pretrained(tmp_path)
    assert open_folder(tmp_path).transformers_because
    Engine.from_hf(tmp_path, learns=False).close()
    with pytest.raises(ValueError, match="native"):
        Engine.from_hf(tmp_path, native=True)
