"""Callbacks: a user's own objects that see each step, evaluation and checkpoint, and the end; and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.engine.loss_metrics import EvaluationLoss
from penstock.engine.pipeline import Pipeline
from penstock.engine.trainer import TrainResult
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.runtime import CallbackError
from penstock.settings import ConfigError
from penstock.settings.arguments import checked
from penstock.settings.objects import load_object

EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_end")


class Watchers:
    """The callbacks of an engine, in the order in which they were added; every rank calls its own.

    A callback is an object with any of these methods, a class that makes one, or ``package.module:object``, the name of
    either:

        on_step(result: TrainResult)                        after each step
        on_evaluation(step: int, loss: EvaluationLoss)      after each `evaluate`
        on_checkpoint(step: int, path: Path)                when a checkpoint is whole
        on_end(step: int)                                   when the engine is closed

    One that returns True from `on_step` or `on_evaluation` asks all ranks to end after the next step, like
    `Engine.request_stop`. One that raises on some rank ends the call on all.
    """

    #: the callbacks, in order
    callbacks: list[Any]
    #: knows whether other ranks have any
    _pipeline: Pipeline

    def __init__(self, pipeline: Pipeline) -> None:
        self.callbacks, self._pipeline = [], pipeline

    def add(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks. Raises: ValueError for one without any of the methods."""
        for given in callbacks:
            found = load_object(given) if isinstance(given, str) else given
            found = found() if isinstance(found, type) else found
            if not any(callable(getattr(found, event, None)) for event in EVENTS):
                raise ConfigError(f"{given!r} is no callback: it has none of the methods {', '.join(EVENTS)}")
            self.callbacks.append(found)
            self._pipeline.is_watched = True

    def saw_step(self, result: TrainResult) -> bool:
        """Show a step to the callbacks of all ranks, if any has some; returns True if one of this rank asks to stop."""
        return self._pipeline.is_watched_anywhere and self._call_together("on_step", result)

    def saw_evaluation(self, loss: EvaluationLoss) -> bool:
        """The same for an evaluation."""
        return self._pipeline.is_watched_anywhere and self._call_together("on_evaluation", self._pipeline.step, loss)

    def saw_checkpoint(self, step: int, path: Path) -> None:
        """Show a checkpoint to the callbacks."""
        self._call_together("on_checkpoint", step, path)

    def saw_end(self) -> None:
        """Show the end to the callbacks of this rank."""
        self._call("on_end", self._pipeline.step)

    def _call_together(self, event: str, *values: Any) -> bool:
        """Call this rank's callbacks; all ranks do so at one point.

        Raises: CallbackError on all ranks, where one raised on some; the exception itself on a rank that is alone.
        """
        grid, recorder = self._pipeline.grid, self._pipeline.recorder
        if grid.control is None:
            return self._call(event, *values)

        def act() -> bool:
            try:
                return self._call(event, *values)
            except Exception as error:
                raise CallbackError(
                    f"rank {grid.rank} failed in {event}, step {self._pipeline.step}: {type(error).__name__}: {error}"
                ) from error

        def gather(value: Any) -> list[Any]:
            with recorder.collective(f"call {event}"):
                return gather_json(value, grid.control)

        with self._pipeline.recovery.joined():
            return on_all_ranks(act, gather, CallbackError, message="{error}")

    def _call(self, event: str, *values: Any) -> bool:
        """Call the method of that name where there is one; returns whether one of them returned True."""
        asked = False
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            # All are called, whatever those before them ask for.
            asked |= method is not None and method(*values) is True
        return asked


class EarlyStop:
    """Stops once `patience` evaluations in a row have not lowered the loss by more than `min_delta`.

    Every rank has the same losses, so all stop at the same evaluation.

    >>> stop = EarlyStop(patience=2)
    >>> [stop.on_evaluation(step, loss) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])]
    [False, False, False, True]

    Raises: ValueError for a patience below one, or a negative `min_delta`.
    """

    #: evaluations without improvement that end the run
    patience: int
    #: what counts as an improvement
    min_delta: float
    #: the lowest loss so far
    best: float
    #: evaluations since then
    num_worse: int

    @checked
    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        if patience < 1 or not min_delta >= 0:
            raise ValueError(
                f"early stopping needs a patience of at least 1 and no negative min_delta, not {patience}, {min_delta}"
            )
        self.patience, self.min_delta = patience, min_delta
        self.best, self.num_worse = math.inf, 0

    @property
    def stopped(self) -> bool:
        """True once the patience is at its end."""
        return self.num_worse >= self.patience

    def on_evaluation(self, step: int, loss: float) -> bool:
        """Note the loss of an evaluation; returns whether to stop."""
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


def step_numbers(taken: TrainResult) -> dict[str, float | int | bool]:
    """The numbers of a step that every tracker writes, by name."""
    seconds = taken.step_time_s
    return {
        "loss": taken.loss,
        "grad_norm": taken.grad_norm,
        "learning_rate": taken.learning_rate,
        "loss_scale": taken.loss_scale,
        "success": taken.success,
        "num_tokens": taken.num_tokens,
        "tokens_per_s": taken.num_tokens / seconds if seconds else 0.0,
        "idle_share": taken.idle_share,
        "step_time_s": seconds,
        **taken.aux_losses.metrics(),
        **taken.metrics,
    }


def evaluation_numbers(loss: EvaluationLoss) -> dict[str, float]:
    """The numbers of an evaluation that every tracker writes, by name."""
    return {"validation_loss": float(loss), **{f"validation_{name}": own for name, own in loss.metrics.items()}}
