"""Experts in a run's settings: read, handed on whole, and refused by name where they cannot be."""

import dataclasses
from typing import Any

import pytest

from penstock.engine.folders.run_check import check_run
from penstock.settings import ConfigError, ExpertConfig, GroupScore, Scores, from_dict


def test_all_settings_reach_the_model() -> None:
    settings = {
        "num_experts": 8,
        "num_active": 3,
        "intermediate_size": 24,
        "scores": "sigmoid",
        "normalise": False,
        "scaling_factor": 2.5,
        "num_groups": 4,
        "num_active_groups": 2,
        "group_score": "best-two",
        "bias_step": 1e-3,
        "microbatch_loss": 0.1,
        "sequence_loss": 0.2,
        "global_loss": 0.3,
        "z_loss": 0.4,
        "shared_size": 16,
        "shared_gate": True,
        "num_dense_first": 1,
        "every": 2,
        "dense_layers": [3],
    }
    assert set(settings) == {field.name for field in dataclasses.fields(ExpertConfig)}
    config = check_run(from_dict({"experts": settings, "model": {"num_predictions": 2, "prediction_loss": 0.1}}))
    expected = settings | {"scores": Scores.SIGMOID, "group_score": GroupScore.BEST_TWO, "dense_layers": (3,)}
    shape = config.model.whole(64)
    assert shape.experts == ExpertConfig(**expected)  # pyright: ignore[reportArgumentType]
    assert (shape.num_predictions, shape.prediction_loss) == (2, 0.1)
    # Each setting differs from its default, so none can have been forgotten.
    defaults = ExpertConfig(num_experts=1, num_active=1, intermediate_size=1)
    assert all(getattr(shape.experts, name) != getattr(defaults, name) for name in settings)


def test_a_model_is_dense_unless_it_is_told_otherwise() -> None:
    assert check_run(from_dict({})).model.whole(64).experts.num_experts == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": {"num_experts": 4, "num_active": 5}}, r"experts\.num_active = 5 .* 4 experts .* at most 4"),
        ({"experts": {"num_experts": 4, "num_active": 0}}, r"experts\.num_active = 0"),
        ({"experts": {"num_experts": 6, "num_groups": 4}}, r"experts\.num_groups = 4 .* 1, 2, 3, 6"),
        ({"experts": {"num_experts": 6, "num_groups": 2, "num_active_groups": 3}}, r"num_active_groups = 3 .* 2"),
        ({"experts": {"num_experts": 6, "num_groups": 3, "num_active": 3}}, r"num_active = 3 .* at most 2"),
        ({"experts": {"num_experts": 4, "shared_gate": True}}, r"experts\.shared_gate .* experts\.shared_size"),
        ({"experts": {"num_experts": 4, "z_loss": -1.0}}, r"experts\.z_loss = -1\.0 is not possible"),
        ({"experts": {"num_experts": 4, "scores": "tanh"}}, r"experts\.scores .*softmax"),
        ({"experts": {"num_expert": 4}}, r"experts\.num_expert; the nearest one is experts\.num_experts"),
        ({"experts": {"num_experts": 3}, "parallel": {"dp": 4, "ep": 4}}, r"parallel\.ep = 4 .*num_experts = 3"),
        ({"parallel": {"dp": 2, "ep": 2}}, r"parallel\.ep = 2 ranks cannot share experts\.num_experts = 0"),
        ({"experts": {"num_experts": 4}, "parallel": {"dp": 4, "ep": 3}}, r"parallel\.ep = 3 does not divide"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(settings))
