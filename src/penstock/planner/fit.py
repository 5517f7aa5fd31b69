"""Fitting the cost model's two free constants to measured steps, and the errors and ranks of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt

from penstock.planner.times import Constants

Predict = Callable[[Constants], float]
"""The step's seconds under some constants."""

_LEAST, _MOST = 0.02, 1.0


@dataclass(frozen=True)
class LinearStep:
    """A step's seconds around some constants, as ``fixed + slowness / compute + actions * action_s``.

    A simulated step is a longest path, so this is exact as long as the path stays the same.
    """

    fixed: float
    slowness: float
    actions: float
    measured_s: float

    @classmethod
    def around(cls, predict: Predict, constants: Constants, measured_s: float) -> LinearStep:
        """Take the slopes from three predictions."""
        slower = replace(constants, compute=constants.compute / 1.05)
        delay = max(constants.action_s, 1e-4) / 4
        base = predict(constants)
        slowness = (predict(slower) - base) / (1 / slower.compute - 1 / constants.compute)
        actions = (predict(replace(constants, action_s=constants.action_s + delay)) - base) / delay
        fixed = base - slowness / constants.compute - actions * constants.action_s
        return cls(fixed, slowness, actions, measured_s)


def fit(rows: Sequence[LinearStep], start: Constants) -> Constants:
    """The constants with the least sum of squared relative errors over some measured steps.

    The time of an action is at least none, and `compute` lies between 0.02 and 1; at its limit the other constant is
    fitted alone. With one row, `compute` alone is fitted; with none, nothing.
    """
    if not rows:
        return start
    slowness = [row.slowness / row.measured_s for row in rows]
    actions = [row.actions / row.measured_s for row in rows]
    wanted = [1 - row.fixed / row.measured_s for row in rows]
    x, y = _solve(slowness, actions, wanted) if len(rows) > 1 else (0.0, -1.0)
    if y < 0 or x <= 0:
        y = 0.0
        x = _dot(slowness, wanted) / (_dot(slowness, slowness) or 1.0)
    if x < 1 / _MOST and len(rows) > 1:
        left = [want - slow / _MOST for want, slow in zip(wanted, slowness, strict=True)]
        y = max(0.0, _dot(actions, left) / (_dot(actions, actions) or 1.0))
    compute = min(_MOST, max(_LEAST, 1 / x if x > 0 else _MOST))
    return replace(start, compute=compute, action_s=y)


def _solve(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> tuple[float, float]:
    """The least squares of ``a x + b y = c``; y is -1 where both columns say the same."""
    aa, ab, bb, ac, bc = _dot(a, a), _dot(a, b), _dot(b, b), _dot(a, c), _dot(b, c)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return 0.0, -1.0
    return (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return fsum(x * y for x, y in zip(a, b, strict=True))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The rank correlation of two lists, ties at their mean rank; None if one has a single rank.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    a, b = _centred_ranks(first), _centred_ranks(second)
    size = sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / size if size else None


def _centred_ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [low + (same - 1) / 2 - (len(values) - 1) / 2 for low, same in zip(below, equal, strict=True)]
