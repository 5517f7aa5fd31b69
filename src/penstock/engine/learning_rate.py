"""Learning rate and weight decay as closed forms of the absolute number of a step, counted from 1.

Nothing is remembered from step to step, so a step that was skipped shifts nothing that comes after it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Decay(enum.StrEnum):
    """How the learning rate falls after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQRT = "inverse_sqrt"


class Ramp(enum.StrEnum):
    """How weight decay goes from its first value to its last."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True)
class LearningRate:
    """A linear rise from `initial` to `peak` over the warm-up, then a fall that ends at `floor`.

    With w warm-up steps and the fall ending at step n, step t in (w, n] has progress x = (t - w) / (n - w) and

        constant      peak
        linear        floor + (peak - floor) (1 - x)
        cosine        floor + (peak - floor) (1 + cos(pi x)) / 2
        inverse_sqrt  max(floor, peak sqrt(max(w, 1) / t)), for any t > w; it has no end

    After step n the linear and the cosine form stay at `floor`.

    num_decay_steps: the number of the step n at which the fall ends; linear and cosine need it.

    Raises: ValueError for values out of range or a form without its end.

    Source: linear warm-up and inverse square root: arXiv 1706.03762, section 5.3. Cosine: arXiv 1608.03983, section 3
    (one cycle).
    """

    peak: float = 1e-3
    decay: Decay = Decay.CONSTANT
    num_warmup_steps: int = 0
    num_decay_steps: int | None = None
    initial: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", _member(Decay, self.decay, "learning-rate decay"))
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise ValueError(f"the peak learning rate must be positive, not {self.peak}")
        for name in ("initial", "floor"):
            if not 0 <= getattr(self, name) <= self.peak:
                raise ValueError(
                    f"the {name} learning rate must lie between 0 and the peak {self.peak}, not {getattr(self, name)}"
                )
        if self.num_warmup_steps < 0:
            raise ValueError(f"the number of warm-up steps must be at least 0, not {self.num_warmup_steps}")
        if self.decay in (Decay.LINEAR, Decay.COSINE):
            if self.num_decay_steps is None:
                raise ValueError(f"a {self.decay} fall of the learning rate needs the step at which it ends")
            if self.num_decay_steps < self.num_warmup_steps:
                raise ValueError(
                    f"the learning rate can not end its fall at step {self.num_decay_steps}, within its warm-up of "
                    f"{self.num_warmup_steps} steps"
                )

    def __call__(self, step: int) -> float:
        """Give the rate of step `step` >= 1; step 0 is the value before any."""
        warmup = self.num_warmup_steps
        if step < warmup:
            return self.initial + (self.peak - self.initial) * step / warmup
        match self.decay:
            case Decay.CONSTANT:
                return self.peak
            case Decay.INVERSE_SQRT:
                first = max(warmup, 1)
                return max(self.floor, self.peak * math.sqrt(first / max(step, first)))
            case Decay.LINEAR:
                return self.floor + (self.peak - self.floor) * (1 - self._progress(step))
            case Decay.COSINE:
                return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * self._progress(step))) / 2

    def _progress(self, step: int) -> float:
        assert self.num_decay_steps is not None
        return _progress(step, self.num_warmup_steps, self.num_decay_steps)


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that goes from `first` to `last` by step `num_steps`, and stays there.

    With progress x = t / num_steps at step t: linear first + (last - first) x; cosine
    first + (last - first) (1 - cos(pi x)) / 2. A constant form has `first` alone.

    Raises: ValueError for values out of range or a form without its end.
    """

    first: float = 0.1
    last: float | None = None
    ramp: Ramp = Ramp.CONSTANT
    num_steps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ramp", _member(Ramp, self.ramp, "form of the weight decay"))
        for value in (self.first, self.last):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"weight decay must be at least 0, not {value}")
        if self.ramp is Ramp.CONSTANT:
            if self.last not in (None, self.first):
                raise ValueError(f"a constant weight decay of {self.first} can not end at {self.last}")
        elif self.last is None or self.num_steps is None or self.num_steps < 1:
            raise ValueError(
                f"a {self.ramp} weight decay needs its last value and the step, at least 1, of reaching it"
            )

    def __call__(self, step: int) -> float:
        """Give the weight decay of step `step` >= 1."""
        if self.ramp is Ramp.CONSTANT:
            return self.first
        assert self.last is not None and self.num_steps is not None
        progress = _progress(step, 0, self.num_steps)
        if self.ramp is Ramp.COSINE:
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.first + (self.last - self.first) * progress


def _progress(step: int, first: int, last: int) -> float:
    return 1.0 if step >= last else (step - first) / (last - first)


def _member(kind: type[enum.StrEnum], value: str, what: str) -> enum.StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"unknown {what} {str(value)!r}; there are {', '.join(kind)}") from None
