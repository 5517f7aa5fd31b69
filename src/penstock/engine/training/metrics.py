"""Numbers that a loss function reports beside the loss, reduced over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.pipeline import Pipeline
from penstock.parallel.host import gather_json
from penstock.parallel.staging import read_numbers
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
            number = getattr(self, name)
            if isinstance(number, Tensor) and number.numel() == 1:
                # A copy of one number: the loss function may change its tensor, or hold a whole graph by it.
                object.__setattr__(self, name, number.detach().clone())
            elif not (isinstance(number, int | float) or (number is None and name == "weight")):
                shape = f" of shape {list(number.shape)}" if isinstance(number, Tensor) else ""
                raise ValueError(f"a metric's {name} is one number, not {type_in_words(number)}{shape}")


def note_metrics(noted: dict[str, list[Metric]], metrics: Mapping[Any, Metric]) -> None:
    """Add what one microbatch reported. Raises: ValueError without a name, or for a name with different reductions."""
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"loss_fn reported a Metric under {name!r}; give each a name")
        parts = noted.setdefault(name, [])
        if parts and parts[0].reduction != metric.reduction:
            raise ValueError(f"loss_fn reported {name!r} as a {parts[0].reduction} and as a {metric.reduction}")
        parts.append(metric)


def reduce_metrics(pipeline: Pipeline, noted: Mapping[str, Sequence[Metric]]) -> dict[str, float]:
    """The numbers by name, the same on every rank; all ranks call it.

    Raises: ValueError on all ranks where some report a name with different reductions.
    """
    # Ranks of a tp group have the same ones, which count once.
    noted = noted if pipeline.grid.tp_rank == 0 else {}
    # Value and weight of each part; tensors are read all at once, to wait for the device only once.
    parts = [number for parts in noted.values() for part in parts for number in (part.value, part.weight)]
    read = iter(read_numbers([number for number in parts if isinstance(number, Tensor)]))
    values = (
        next(read) if isinstance(number, Tensor) else 1.0 if number is None else float(number) for number in parts
    )
    rows = {
        name: [str(parts[0].reduction), [[next(values), next(values)] for _ in parts]] for name, parts in noted.items()
    }
    with pipeline.recorder.collective("gather the loss's metrics"):
        by_rank = gather_json(rows, pipeline.grid.control)
    merged: dict[str, tuple[str, list[Any]]] = {}
    for rank_rows in by_rank:
        for name, (reduction, numbers) in rank_rows.items():
            kind, every = merged.setdefault(name, (reduction, []))
            if kind != reduction:
                raise ValueError(f"ranks reported the loss's {name!r} as a {kind} and as a {reduction}")
            every.extend(numbers)
    return {name: _reduced(MetricReduction(kind), numbers) for name, (kind, numbers) in sorted(merged.items())}


def _reduced(reduction: MetricReduction, numbers: Sequence[Sequence[float]]) -> float:
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
