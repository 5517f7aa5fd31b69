"""The names that a script takes from `penstock`: without PyTorch until one needs it, and with strings for enums."""

# pyright: reportArgumentType=false

import subprocess
import sys

import pytest
import torch

import penstock
from penstock import Extent, PackedBatch, schedule
from penstock.schedule import PlacementKind


@pytest.mark.shows(118)
def test_settings_come_without_pytorch() -> None:
    names = [name for name in penstock.__all__ if getattr(penstock, name).__class__ is not str]
    free = [
        name for name in names if getattr(getattr(penstock, name), "__module__", "").startswith("penstock.settings")
    ]
    assert {"OptimizerConfig", "LearningRate", "Layout", "ScheduleConfig", "SamplingParams"} <= set(free)
    program = f"import sys, penstock; [getattr(penstock, name) for name in {free}]; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.shows(118)
def test_every_public_name_is_listed() -> None:
    assert set(penstock.__all__) <= set(dir(penstock))
    assert {"Engine", "EngineOptions", "OptimizerConfig", "LearningRate"} <= set(penstock.__all__)


@pytest.mark.shows(118)
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (penstock.EngineOptions(precision="bf16"), penstock.Precision.BF16),
        (penstock.EngineOptions(attention="all_to_all"), "all-to-all"),
        (penstock.LearningRate(decay="inverse_sqrt"), penstock.Decay.INVERSE_SQRT),
        (penstock.TrainConfig(normalize="microbatch_mean"), penstock.Normalize.MICROBATCH_MEAN),
    ],
)
def test_a_name_does_for_an_enum(given: object, wanted: object) -> None:
    assert wanted in vars(given).values() and type(wanted) in (*(type(v) for v in vars(given).values()), str)


@pytest.mark.shows(118)
def test_a_name_does_for_the_extent_of_a_key() -> None:
    batch = PackedBatch.from_documents([[5, 6, 7], [8, 9]])
    for name, num_rows in (("item", 2), ("token", 5), ("transition", 3)):
        by_name = batch.with_key("more", torch.zeros(num_rows), name)
        assert by_name.lengths == batch.with_key("more", torch.zeros(num_rows), Extent[name.upper()]).lengths
    with pytest.raises(ValueError, match='extent = \'row\': expected "item", "token" or "transition"'):
        batch.with_key("more", torch.zeros(2), "row")


@pytest.mark.shows(118)
@pytest.mark.parametrize("kind", [kind for kind in PlacementKind if kind is not PlacementKind.MAP])
def test_a_name_does_for_a_placement(kind: PlacementKind) -> None:
    placement = schedule.Placement(kind.value, num_ranks=4, stages_per_rank=2)
    assert placement == schedule.Placement(kind, 4, 2) and placement.kind is kind
    with pytest.raises(ValueError, match="there is no placement 'w'; possible are loop, v, bidirectional, map"):
        schedule.Placement("w", 2)


@pytest.mark.shows(118)
def test_a_number_does_for_a_constant_rate() -> None:
    given = penstock.OptimizerConfig(learning_rate=3e-4, weight_decay=0)
    assert given == penstock.OptimizerConfig(penstock.LearningRate(3e-4), weight_decay=penstock.WeightDecay(0.0))
    assert given.learning_rate(7) == 3e-4 and given.weight_decay(7) == 0.0  # pyright: ignore[reportCallIssue, reportOptionalCall]
