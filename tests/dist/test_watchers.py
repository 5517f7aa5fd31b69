"""Callbacks of an engine: every rank sees each step, evaluation, checkpoint and the end, and may ask all to stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, EngineOptions, Layout, PackedBatch
from penstock.engine.callbacks import PROMETHEUS_FILE, EarlyStop, Trackers
from penstock.engine.folders.runs import read_metrics
from penstock.engine.training.trainer import TrainResult
from penstock.model import decoder_units
from penstock.settings import LogConfig
from tests.dist.grid_cases import DENSE, VOCABULARY
from tests.dist.launch import run_ranks


class Seen:
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step(self, result: TrainResult) -> None:
        self.events.append(["step", result.step, result.loss])

    def on_evaluation(self, step: int, loss: float) -> None:
        self.events.append(["evaluation", step, float(loss)])

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.events.append(["checkpoint", step, path.name, (path / "manifest.json").exists()])

    def on_end(self, step: int) -> None:
        self.events.append(["end", step])


class StopsAt:
    """Asks for the end from one rank alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step(self, result: TrainResult) -> bool:
        return result.step == 2 and torch.distributed.get_rank() == self.rank


def watched(rank: int, layout: Layout, folder: Path) -> list[Any]:
    engine = Engine(
        lambda groups: decoder_units(DENSE, groups=groups), DENSE.hidden_size, layout, EngineOptions(timeout_s=60.0)
    )
    generator = torch.Generator().manual_seed(5)
    lengths = range(3, 3 + 4 * layout.dp)
    documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    batch = PackedBatch.from_documents(documents[engine.grid.dp_rank :: layout.dp])
    seen, stop = Seen(), StopsAt(layout.world_size - 1)
    engine.watch(seen, stop)
    if rank == 0:
        engine.watch(Trackers.open(folder / "log", LogConfig(tensorboard=False, prometheus=True)))
    while True:
        taken = engine.train_batch(batch)
        if taken.step == 1:
            engine.evaluate([batch])
            engine.save(folder / "saved")
        if taken.stop_requested:
            break
    engine.close()
    return seen.events


@pytest.mark.shows(117)
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, tp=2), Layout(pp=2, cp=2)], ids=str)
def test_every_rank_sees_the_same_and_one_may_stop_all(tmp_path: Path, layout: Layout) -> None:
    by_rank = run_ranks(layout.world_size, watched, layout, tmp_path, timeout_s=60.0)
    assert by_rank == [by_rank[0]] * layout.world_size
    kinds = [(event[0], event[1]) for event in by_rank[0]]
    assert kinds == [("step", 1), ("evaluation", 1), ("checkpoint", 1), ("step", 2), ("step", 3), ("end", 3)]
    assert by_rank[0][2] == ["checkpoint", 1, "step-00000001", True]
    lines = read_metrics(tmp_path / "log" / "metrics.jsonl")
    losses = [event[2] for event in by_rank[0] if event[0] == "step"]
    assert [line["loss"] for line in lines if "loss" in line] == losses
    assert [line["validation_loss"] for line in lines if "validation_loss" in line] == [by_rank[0][1][2]]
    gauges = gauges_of(tmp_path / "log" / PROMETHEUS_FILE)
    assert gauges["penstock_loss"] == losses[-1] and gauges["penstock_validation_loss"] == by_rank[0][1][2]
    assert gauges["penstock_step"] == 3


def gauges_of(path: Path) -> dict[str, float]:
    lines = path.read_text().splitlines()
    assert lines[0] == "# TYPE penstock_step gauge"
    return {name: float(value) for name, value in (line.split(" ") for line in lines if not line.startswith("#"))}


@pytest.mark.shows(117)
def test_early_stopping_counts_evaluations_without_a_lower_loss() -> None:
    stop = EarlyStop(patience=2, min_delta=0.1)
    told = [stop.on_evaluation(step, loss) for step, loss in enumerate([3.0, 2.95, 2.8, float("nan"), 2.75])]
    assert told == [False, False, False, False, True] and stop.best == 2.8
    again = EarlyStop(patience=3, min_delta=0.1)
    again.load_state(json.loads(json.dumps(stop.state())))
    assert not again.stopped and again.on_evaluation(5, 2.8) and again.stopped
    fresh = EarlyStop(patience=1)
    fresh.load_state(json.loads(json.dumps(EarlyStop(1).state())))
    assert not fresh.on_evaluation(1, 1e9)
    with pytest.raises(ValueError, match="a patience of at least 1"):
        EarlyStop(0)
