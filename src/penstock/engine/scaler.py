"""The loss scale of fp16 training: as large as gradients stay finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LossScalerConfig:
    """How the scale moves: down at once by `backoff` when a step fails, up by `growth` after that many good ones.

    All factors are powers of two, so that scaling and unscaling round nothing.

    Raises: ValueError for values that are no powers of two, or out of range.

    Source: arXiv 1710.03740, section 3.2.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    num_growth_steps: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "growth", "backoff", "smallest", "largest"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5):
                raise ValueError(f"the loss scaler's {name} must be a power of two, not {value}")
        if not self.backoff < 1 <= self.growth:
            raise ValueError(f"the loss scale must fall by backoff {self.backoff} < 1 and rise by growth {self.growth}")
        if not self.smallest <= self.initial <= self.largest:
            raise ValueError(f"the loss scale {self.initial} is outside its bounds {self.smallest} to {self.largest}")
        if self.num_growth_steps < 1:
            raise ValueError(f"the loss scale can rise after 1 step at the earliest, not {self.num_growth_steps}")


class LossScaler:
    """The scale of the present step, the same on every rank because every rank is told the same outcomes."""

    def __init__(self, config: LossScalerConfig | None = None) -> None:
        self.config = config or LossScalerConfig()
        self.scale = self.config.initial
        self._num_good_steps = 0

    def update(self, success: bool) -> None:
        """Learn whether the step's gradients were finite, and set the scale of the next."""
        if not success:
            self.scale = max(self.scale * self.config.backoff, self.config.smallest)
            self._num_good_steps = 0
            return
        self._num_good_steps += 1
        if self._num_good_steps == self.config.num_growth_steps:
            self.scale = min(self.scale * self.config.growth, self.config.largest)
            self._num_good_steps = 0

    def state(self) -> dict[str, Any]:
        """Give what a resumed run must know, as JSON values."""
        return {"scale": self.scale, "num_good_steps": self._num_good_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.scale, self._num_good_steps = float(state["scale"]), int(state["num_good_steps"])
