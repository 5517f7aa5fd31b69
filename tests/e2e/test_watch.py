"""`penstock train` with callbacks, all trackers and early stopping; interrupted, each goes on where it was."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.engine.callbacks import PROMETHEUS_FILE
from penstock.engine.folders.runs import METRICS_FILE, read_metrics
from tests.e2e.training import Started, exact_metrics, result_of, write_run

# The library itself would want the network: this one writes down what it is given.
WANDB = """
import json, pathlib
class Run:
    def __init__(self, given): self.file = pathlib.Path(given["dir"]) / "wandb.jsonl"; self._write(["init", given])
    def _write(self, row): self.file.open("a").write(json.dumps(row) + "\\n")
    def log(self, values, step): self._write(["log", step, values])
    def finish(self): self._write(["finish"])
def init(**given): return Run(given)
"""
CALLBACK = """
import json, os, pathlib
class Seen:
    def __init__(self): self.file = pathlib.Path(os.environ["SEEN"] + os.environ.get("RANK", "0")).open("a")
    def write(self, *row): self.file.write(json.dumps(row) + "\\n"); self.file.flush()
    def on_step(self, result): self.write("step", result.step)
    def on_evaluation(self, step, loss): self.write("evaluation", step, float(loss))
    def on_checkpoint(self, step, path): self.write("checkpoint", step, (path / "manifest.json").exists())
    def on_end(self, step): self.write("end", step)
"""
EVERY_5 = ["--validation.every", "5", "--checkpoint.every", "5"]


def train(folder: Path, file: Path, *more: str) -> dict[str, Any]:
    environ = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "SEEN": str(folder / "seen-")}
    with Started([str(file), *EVERY_5, "--optimizer.decay", "constant", "--json", *more], environ) as started:
        return result_of(started.end())


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.shows(117)
def test_callbacks_and_trackers_see_all_of_an_interrupted_run(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "own.py").write_text(CALLBACK)
    file = write_run(tmp_path, "run", 20)
    logs = ["--log.tensorboard", "true", "--log.prometheus", "true", "--log.wandb", "mine"]
    watch = ["--watch.callbacks", f"{tmp_path}/own.py:Seen"]
    assert train(tmp_path, file, *logs, *watch, "--train.steps", "10")["step"] == 10
    assert train(tmp_path, file, *logs, *watch)["resumed_from"] == 10
    plain = write_run(tmp_path, "plain", 20)
    train(tmp_path, plain)
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "plain")
    # Callbacks: on each rank alike, all events once.
    seen = rows_of(tmp_path / "seen-0")
    assert seen == rows_of(tmp_path / "seen-1")
    assert [row[1] for row in seen if row[0] == "step"] == list(range(1, 21))
    assert [row[1:] for row in seen if row[0] == "checkpoint"] == [[step, True] for step in (5, 10, 15, 20)]
    assert [row for row in seen if row[0] == "end"] == [["end", 10], ["end", 20]]
    # Trackers: the same numbers everywhere.
    lines = read_metrics(tmp_path / "run" / METRICS_FILE)
    wanted = {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}
    assert len([name for name in wanted if name[1] == "validation_loss"]) == 4
    assert [row[1] for row in seen if row[0] == "evaluation"] == [s for s, name in wanted if name == "validation_loss"]
    logged = rows_of(tmp_path / "run" / "wandb.jsonl")
    first, second = (row[1] for row in logged if row[0] == "init")
    assert first == second and first["project"] == "mine" and first["id"]
    found = {(row[1], name): value for row in logged if row[0] == "log" for name, value in row[2].items()}
    assert found == wanted
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("loss", "validation_loss", "grad_norm"):
        scalars = {(event.step, name): event.value for event in board.Scalars(name)}
        assert scalars == pytest.approx({key: value for key, value in wanted.items() if key[1] == name}, rel=1e-6)
    gauges = (tmp_path / "run" / PROMETHEUS_FILE).read_text().splitlines()
    assert f"penstock_loss {wanted[20, 'loss']!r}" in gauges and "penstock_step 20.0" in gauges
