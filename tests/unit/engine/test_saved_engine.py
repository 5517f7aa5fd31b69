"""`Engine.save` and `Engine.load` in one process: what is kept, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock import Engine, EngineOptions, PackedBatch
from penstock.engine.checkpoint import AnotherRun, DamagedCheckpoint


def engine_of(width: int = 8, num_layers: int = 2, **options: object) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, width), *(nn.Linear(width, width) for _ in range(num_layers)), nn.Linear(width, 16)]
    return Engine.from_layers(layers, hidden_size=width, options=EngineOptions(**options))  # pyright: ignore[reportArgumentType]


def step(engine: Engine) -> float:
    return engine.train_batch(PackedBatch.from_documents([torch.arange(5), torch.arange(9)])).loss


@pytest.mark.shows(118)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "bf16-autocast", "fp16"])
def test_the_next_steps_have_the_same_bits(tmp_path: Path, precision: str) -> None:
    engine = engine_of(precision=precision)
    step(engine)
    engine.save(tmp_path)
    wanted = [step(engine), step(engine), engine.evaluate([PackedBatch.from_documents([torch.arange(9)])])]
    assert wanted[0] != wanted[1]
    engine.load(tmp_path)
    assert engine.step == 1
    again = [step(engine), step(engine), engine.evaluate([PackedBatch.from_documents([torch.arange(9)])])]
    assert again == wanted


@pytest.mark.shows(118)
def test_weights_that_are_fixed_are_cast_anew(tmp_path: Path) -> None:
    engine, batch = engine_of(precision="bf16-autocast"), PackedBatch.from_documents([torch.arange(9)])
    engine.save(tmp_path)
    before = engine.evaluate([batch])
    for _ in range(5):
        step(engine)
    with engine.fixed_weights():
        assert engine.evaluate([batch]) != before
        engine.load(tmp_path)
        assert engine.evaluate([batch]) == before


@pytest.mark.shows(118)
def test_random_numbers_go_on(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path, extra=[1, {"position": 3}])
    drawn = torch.rand(3).tolist(), random.random()
    assert engine.load(tmp_path) == [1, {"position": 3}]
    assert (torch.rand(3).tolist(), random.random()) == drawn


def test_what_was_saved_last_is_what_is_loaded(tmp_path: Path) -> None:
    engine = engine_of()
    for _ in range(3):
        step(engine)
    engine.save(tmp_path, "late")
    fresh = engine_of()
    step(fresh)
    fresh.save(tmp_path, "early")
    assert engine.load(tmp_path) == "early" and engine.step == 1
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
    for _ in range(3):
        step(fresh)
        fresh.save(tmp_path, fresh.step, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert engine.load(tmp_path) == 4
    assert engine.load(tmp_path / "step-00000003") == 3 and engine.step == 3


@pytest.mark.shows(118)
def test_an_engine_that_only_scores_takes_the_weights(tmp_path: Path) -> None:
    engine, batch = engine_of(), PackedBatch.from_documents([torch.arange(9)])
    step(engine)
    engine.save(tmp_path)
    scores = engine_of(learns=False)
    assert scores.evaluate([batch]) != engine.evaluate([batch])
    scores.load(tmp_path)
    assert scores.evaluate([batch]) == engine.evaluate([batch])


def test_what_cannot_be_loaded_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    engine, batch = engine_of(), PackedBatch.from_documents([torch.arange(9)])
    step(engine)
    before = engine.evaluate([batch])
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        engine.load(tmp_path / "nothing")
    engine.save(tmp_path / "own")
    for other, message in ((engine_of(num_layers=3), "lacks 6 of the tensors"), (engine_of(width=4), "has the shape")):
        with pytest.raises(ValueError, match=message):
            other.load(tmp_path / "own")
    engine_of(num_layers=3).save(tmp_path / "larger")
    with pytest.raises(ValueError, match=r"holds 6 tensors that the model lacks: \['layers\.4\.bias'"):
        engine.load(tmp_path / "larger")
    [file, *_] = (tmp_path / "own" / "step-00000001").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="bytes instead of"):
        engine.load(tmp_path / "own")
    assert engine.evaluate([batch]) == before and engine.step == 1


def test_a_runs_checkpoints_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"identity": {"train.seed": 0}}))
    with pytest.raises(AnotherRun, match=r"train\.seed"):
        engine_of().save(tmp_path)
