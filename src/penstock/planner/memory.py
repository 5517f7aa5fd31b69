"""The memory of a rank: its state, its tapes, and what a unit needs while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planner.model_costs import UnitCosts


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    tapes: float = 0.0
    #: the largest unit's intermediate results
    transient: float = 0.0
    reserved: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.tapes + self.transient + self.reserved


@dataclass(frozen=True)
class StageTransient:
    """The needs of a stage besides its tapes while one of its units runs.

    `grown_bytes`: what a tape gains in I where backward computes again what it keeps for W. By then the head, whose
    needs are the greatest, is done, so only `late_bytes` are needed besides; before, `bytes`.
    """

    bytes: float
    late_bytes: float
    grown_bytes: float

    @classmethod
    def of(cls, units: Sequence[UnitCosts], head: UnitCosts) -> StageTransient:
        grown = sum(unit.weight_bytes - unit.kept_bytes for unit in units)
        late = (unit.transient_bytes - max(0.0, unit.weight_bytes - unit.kept_bytes) for unit in units if unit != head)
        return cls(max(unit.transient_bytes for unit in units), max(late, default=0.0), max(0.0, grown))

    def most_beside(self, tapes: float, splits: bool) -> tuple[float, float]:
        """The tapes and the bytes besides at the moment that needs the most; `tapes` are the most at any time."""
        if not splits:
            return tapes, self.bytes
        return max((tapes, self.late_bytes), (tapes - self.grown_bytes, self.bytes), key=sum)
