"""Trackers: each writes the same numbers of a run, by step and name, somewhere else; one rank has them.

JSON lines and TensorBoard are those of `penstock.engine.runs`; a Prometheus text file and Weights & Biases are here.
"""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from penstock.engine.loss_metrics import EvaluationLoss
from penstock.engine.runs import MetricsLog
from penstock.engine.trainer import TrainResult
from penstock.engine.watch import evaluation_numbers, step_numbers
from penstock.settings import ConfigError, LogConfig
from penstock.settings.arguments import checked
from penstock.settings.durable import naming
from penstock.settings.files import read_text

PROMETHEUS_FILE = "metrics.prom"
_WANDB_FILE = "wandb.id"


class Tracker(Protocol):
    """The destination of a run's numbers."""

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Write the values of a step."""
        ...

    def close(self) -> None: ...


class PrometheusFile:
    """The latest value of each number as a gauge ``penstock_<name>``, in a file for Prometheus's textfile collector.

    The file is replaced in one go, so that a reader never sees half of it. A number that is not finite is written as
    Prometheus spells it.
    """

    #: the file, in a folder that exists
    _path: Path
    #: name -> latest value
    _values: dict[str, float]

    def __init__(self, path: Path) -> None:
        self._path, self._values = path, {}

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Write all latest values, these included."""
        self._values |= {"step": float(step), **{name: float(value) for name, value in values.items()}}
        lines = []
        for name, value in self._values.items():
            gauge = f"penstock_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            lines += [f"# TYPE {gauge} gauge", f"{gauge} {_spelt(value)}"]
        new = self._path.with_suffix(".new")
        with naming(self._path):
            new.write_text("\n".join(lines) + "\n", encoding="utf-8")
            os.replace(new, self._path)

    def close(self) -> None:
        """Leave the file as it is: the collector goes on reading it."""


class WandbTracker:
    """A run of Weights & Biases, which a resumed run continues; the library is imported on use.

    Raises: ConfigError where it is not installed.
    """

    #: the library's run
    _run: Any

    def __init__(self, folder: Path, project: str) -> None:
        try:
            library: Any = import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"log.wandb = {project!r} needs the library wandb, which is not installed; pip install wandb, or leave "
                "the setting out"
            ) from None
        file = folder / _WANDB_FILE
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        self._run = library.init(project=project, id=read_text(file), resume="allow", dir=str(folder))

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Log the values under their step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run. As a callback (`Engine.watch`) it writes each step and evaluation.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     engine.watch(Trackers.open(folder, LogConfig(tensorboard=False)))  # on one rank alone
    ...     result = engine.train_batch(PackedBatch.from_documents([torch.arange(5)]))
    ...     engine.close()
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['metrics.jsonl']
    """

    #: the trackers, each of which gets every number
    _trackers: tuple[Tracker, ...]

    @checked
    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    @classmethod
    def open(cls, folder: str | Path, log: LogConfig | None = None, resumed_step: int = 0) -> Trackers:
        """Open the trackers that `log` asks for, in a folder; a run that continues drops the lines of later steps."""
        folder, log = Path(folder), log or LogConfig()
        folder.mkdir(parents=True, exist_ok=True)
        found: list[Tracker] = [MetricsLog(folder, resumed_step, log.tensorboard)]
        if log.prometheus:
            found.append(PrometheusFile(folder / PROMETHEUS_FILE))
        if log.wandb:
            found.append(WandbTracker(folder, log.wandb))
        return cls(found)

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Write the values of a step everywhere."""
        for tracker in self._trackers:
            tracker.write(step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def on_step(self, taken: TrainResult) -> None:
        """Write the numbers of a step."""
        self.write(taken.step, step_numbers(taken))

    def on_evaluation(self, step: int, loss: EvaluationLoss) -> None:
        """Write the numbers of an evaluation."""
        self.write(step, evaluation_numbers(loss))

    def on_end(self, step: int) -> None:
        """Close all of them."""
        self.close()


def _spelt(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
