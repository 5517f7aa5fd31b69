"""Numbers that a loss function reports beside the loss, reduced over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.settings.declare import NamedValue, type_in_words


class MetricReduction(NamedValue):
    """The way from the microbatches' numbers to that of the step; a mean is weighted.

    >>> MetricReduction("mean") is MetricReduction.MEAN
    True
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


_REDUCTIONS = [reduction.value for reduction in MetricReduction]


@dataclass(frozen=True)
class Metric:
    """One microbatch's part of a number that a loss function reports.

    Args:
        value: a number, or a tensor of one element.
        reduction: over microbatches and ranks: "sum", "mean", "min" or "max".
        weight: that of `value` in the mean, such as the number of tokens of which it is the mean.

    Raises: ValueError for another reduction, a value of more than one element, or a weight without a mean.

    >>> def loss_fn(logits, microbatch):
    ...     labels = microbatch["labels"]
    ...     hits = logits.argmax(-1)[labels != NO_LABEL] == labels[labels != NO_LABEL]
    ...     loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    ...     return loss, {"accuracy": Metric(hits.float().mean(), "mean", weight=len(hits))}
    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> result = engine.train_batch(PackedBatch.from_documents([torch.arange(5), torch.arange(3)]), loss_fn)
    >>> 0 <= result.metrics["accuracy"] <= 1
    True
    """

    value: float | Tensor
    reduction: MetricReduction | str = MetricReduction.SUM
    weight: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.reduction not in _REDUCTIONS:
            raise ValueError(f"a metric's reduction is one of {', '.join(_REDUCTIONS)}, not {self.reduction!r}")
        if self.weight is not None and self.reduction != MetricReduction.MEAN:
            raise ValueError(f"a metric's weight counts in a mean alone, not in a {self.reduction}; leave it out")
        for name in ("value", "weight"):
            given = getattr(self, name)
            if isinstance(given, Tensor) and given.numel() == 1:
                # A copy of one number: the loss function may change its tensor, or hold a whole graph by it.
                object.__setattr__(self, name, given.detach().clone())
            elif not (isinstance(given, int | float) or (given is None and name == "weight")):
                shape = f" of shape {list(given.shape)}" if isinstance(given, Tensor) else ""
                raise ValueError(f"a metric's {name} is one number, not {type_in_words(given)}{shape}")


def reduced_number(reduction: MetricReduction, numbers: Sequence[Sequence[float]]) -> float:
    """One number of all parts, in one rounding, so that their order does not matter; NaN if the mean has no weight."""
    if reduction is MetricReduction.MEAN:
        # A part without weight may be the mean of nothing.
        numbers = [(value, weight) for value, weight in numbers if weight]
    values = [value for value, _ in numbers]
    if any(map(math.isnan, values)):
        # Python's min and max would depend on the order.
        return math.nan
    match reduction:
        case MetricReduction.SUM:
            return _sum(values)
        case MetricReduction.MEAN:
            total = _sum([weight for _, weight in numbers])
            return _sum([value * weight for value, weight in numbers]) / total if total else math.nan
        case MetricReduction.MIN:
            return min(values)
    return max(values)


def _sum(values: Sequence[float]) -> float:
    """The exact sum, rounded once; infinities add up as floats do."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
