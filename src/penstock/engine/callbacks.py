"""Callbacks, which see each step, evaluation and checkpoint of an engine: early stopping, and trackers of numbers."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from penstock.engine.folders.runs import MetricsLog, writes_tensorboard
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.loss import EvaluationLoss
from penstock.engine.training.trainer import TrainResult
from penstock.io.files import naming, read_text
from penstock.parallel.host import on_all_ranks
from penstock.runtime import CallbackError
from penstock.settings import ConfigError, LogConfig
from penstock.settings.declare import checked, words_of
from penstock.settings.objects import load_object

EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")


@dataclass(eq=False)
class Callbacks:
    """The callbacks of an engine on this rank (see `Engine.watch`), in the order in which they were added.

    If one of them raises, the call ends on all ranks.
    """

    #: told of callbacks, so that other ranks learn of them
    pipeline: Pipeline
    #: the callbacks, in order
    added: list[Any] = field(default_factory=list)

    def add(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks. Raises: ConfigError for one without any of the methods."""
        for callback in callbacks:
            instance = load_object(callback) if isinstance(callback, str) else callback
            instance = instance() if isinstance(instance, type) else instance
            if not any(callable(getattr(instance, event, None)) for event in EVENTS):
                raise ConfigError(f"{callback!r} is no callback: it has none of the methods {', '.join(EVENTS)}")
            self.added.append(instance)
            self.pipeline.has_callbacks = True

    def notify(self, event: str, *values: Any) -> bool:
        """Call the method `event` of the callbacks, on all ranks at one point; True if one of them returned True.

        Raises: CallbackError on all ranks if a callback raised on one; the exception itself on a rank that is alone.
        """
        grid, recorder = self.pipeline.grid, self.pipeline.recorder
        if grid.control is None:
            return self.call(event, *values)

        def act() -> bool:
            try:
                return self.call(event, *values)
            except Exception as error:
                what = f"{type(error).__name__}: {words_of(error)}"
                raise CallbackError(f"rank {grid.rank} failed in {event}, step {self.pipeline.step}: {what}") from error

        gathering = recorder.collective(f"call {event}")
        with self.pipeline.recovery.joined():
            return on_all_ranks(act, grid.control, CallbackError, message="{error}", within=gathering)

    def call(self, event: str, *values: Any) -> bool:
        """Call the callbacks on this rank alone; True if one of them returned True."""
        is_asked_to_stop = False
        for callback in self.added:
            method = getattr(callback, event, None)
            # All are called, even if an earlier one asks to stop.
            is_asked_to_stop |= method is not None and method(*values) is True
        return is_asked_to_stop


@checked
@dataclass(eq=False)
class EarlyStop:
    """Stops after `patience` evaluations in a row that have not lowered the loss by more than `min_delta`.

    All ranks see the same losses, so they stop at the same evaluation.

    >>> stop = EarlyStop(patience=2)
    >>> [stop.on_evaluation(step, loss) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])]
    [False, False, False, True]

    Raises: ValueError for a patience below one, or a negative `min_delta`.
    """

    #: evaluations without improvement that end the run
    patience: int
    #: the least decrease of the loss that counts as an improvement
    min_delta: float = 0.0
    #: the lowest loss so far
    best: float = field(default=math.inf, init=False)
    #: evaluations since then
    num_worse: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            values = f"{self.patience}, {self.min_delta}"
            raise ValueError(f"early stopping needs a patience of at least 1 and no negative min_delta, not {values}")

    @property
    def stopped(self) -> bool:
        """True after `patience` evaluations without improvement."""
        return self.num_worse >= self.patience

    def on_evaluation(self, step: int, loss: float) -> bool:
        """Note the loss of an evaluation; True to stop."""
        if loss < self.best - self.min_delta or (self.best == math.inf and math.isfinite(loss)):
            self.best, self.num_worse = float(loss), 0
        else:
            self.num_worse += 1
        return self.stopped

    def state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs, as JSON values."""
        return {"best": self.best if math.isfinite(self.best) else None, "num_worse": self.num_worse}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.num_worse = int(state["num_worse"])


def step_numbers(result: TrainResult) -> dict[str, float | int | bool]:
    """The numbers of a step that every tracker writes, by name."""
    seconds = result.step_time_s
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "loss_scale": result.loss_scale,
        "success": result.success,
        "num_tokens": result.num_tokens,
        "tokens_per_s": result.num_tokens / seconds if seconds else 0.0,
        "idle_share": result.idle_share,
        "step_time_s": seconds,
        **result.aux_losses.metrics(),
        **result.metrics,
    }


# ---- Trackers: destinations of a run's numbers, on one rank


PROMETHEUS_FILE = "metrics.prom"
_WANDB_FILE = "wandb.id"


class Tracker(Protocol):
    """The destination of a run's numbers."""

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Write the values of a step."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class PrometheusFile:
    """The latest value of each number as a gauge ``penstock_<name>``, in a file for Prometheus's textfile collector.

    The file is replaced at once, so that a reader never sees half of it. Prometheus has words of
    its own for NaN and infinities.
    """

    #: the file, in a folder that exists
    _path: Path
    #: name -> latest value
    _values: dict[str, float] = field(default_factory=dict)

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Write all latest values, these included."""
        self._values |= {"step": float(step), **{name: float(value) for name, value in values.items()}}
        lines = []
        for name, value in self._values.items():
            gauge = f"penstock_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            spelt = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
            lines += [f"# TYPE {gauge} gauge", f"{gauge} {spelt}"]
        new = self._path.with_suffix(".new")
        with naming(self._path):
            new.write_text("\n".join(lines) + "\n", encoding="utf-8")
            os.replace(new, self._path)

    def close(self) -> None:
        """Leave the file, which the collector goes on reading."""


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
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@checked
@dataclass(frozen=True, eq=False)
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
    trackers: Sequence[Tracker]

    @classmethod
    def open(cls, folder: str | Path, log: LogConfig | None = None, resumed_step: int = 0) -> Trackers:
        """Open the trackers that `log` asks for, in a folder; a run that continues drops the lines of later steps."""
        folder, log = Path(folder), log or LogConfig()
        folder.mkdir(parents=True, exist_ok=True)
        trackers: list[Tracker] = [MetricsLog(folder, resumed_step, writes_tensorboard(log))]
        if log.prometheus:
            trackers.append(PrometheusFile(folder / PROMETHEUS_FILE))
        if log.wandb:
            trackers.append(WandbTracker(folder, log.wandb))
        return cls(trackers)

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        for tracker in self.trackers:
            tracker.write(step, values)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def on_step(self, result: TrainResult) -> None:
        self.write(result.step, step_numbers(result))

    def on_evaluation(self, step: int, loss: EvaluationLoss) -> None:
        validation = {f"validation_{name}": value for name, value in loss.metrics.items()}
        self.write(step, {"validation_loss": float(loss), **validation})

    def on_end(self, step: int) -> None:
        self.close()
