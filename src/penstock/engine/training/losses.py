"""The loss of a reward model, which learns from pairs of texts which of the two is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.data import NO_LABEL, PackedBatch
from penstock.engine.pipeline import Pipeline
from penstock.model import Logits, cross_entropy_sum
from penstock.parallel.host import gather_json
from penstock.settings import Normalize
from penstock.settings.arguments import type_in_words
from penstock.settings.declare import NamedValue

# ---- The loss of a step: the default loss function and its weight, and what the loss is divided by


LossFn = Callable[[Any, PackedBatch], Any]
"""A function from the last stage's output and its microbatch to the sum of the microbatch's losses, a tensor.

Beside it, in a pair, it may give a dict of the numbers that it reports: name -> `Metric`.
"""

LossWeightFn = Callable[[PackedBatch], float]
"""A microbatch's weight in the denominator."""


def token_cross_entropy(output: Logits, microbatch: PackedBatch) -> Tensor:
    """The sum of the tokens' cross entropies in nats; the default loss of a language model.

    >>> batch = PackedBatch.from_documents([torch.tensor([0, 1, 0])])
    >>> logits = torch.zeros(3, 2)
    >>> round(float(token_cross_entropy(logits, batch)) / num_loss_tokens(batch), 4)
    0.6931
    """
    return cross_entropy_sum(output, microbatch["labels"].to(output.device))


def num_loss_tokens(microbatch: PackedBatch) -> float:
    """The number of tokens with a label: the weight that belongs to `token_cross_entropy`.

    >>> num_loss_tokens(PackedBatch.from_documents([torch.tensor([0, 1, 0]), torch.tensor([1, 1])]))
    3.0
    """
    return float((microbatch["labels"] != NO_LABEL).sum())


def checked_loss(loss: Any) -> Tensor:
    """Refuse what no step can learn from. Raises: ValueError unless `loss` is one number with its graph."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    given = f"{type_in_words(loss)}"
    if isinstance(loss, Tensor):
        given = f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
    raise ValueError(
        f"loss_fn gave {given}; a step learns from the sum of a microbatch's losses, one number with its graph, and "
        "`forward` gives whatever else is to be made of the outputs"
    )


class ZeroLossWeight(ValueError):
    """No token of the whole batch, on any rank, carries loss; raised on all ranks alike, before any backward.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> engine.train_batch(PackedBatch.from_documents([torch.arange(1)]))
    Traceback (most recent call last):
    penstock.engine.training.losses.ZeroLossWeight: the loss weights of the whole batch sum to 0 over 1 ...
    """


def loss_factors(mode: Normalize, weights: Sequence[float], rank_totals: Sequence[float]) -> list[float]:
    """The factor of each of this rank's microbatches.

    Args:
        weights: loss weight of each microbatch on this data-parallel rank.
        rank_totals: sum of the weights on each data-parallel rank, this one included.

    Raises:
        ZeroLossWeight: all totals are zero.
    """
    num_dp, total = len(rank_totals), math.fsum(rank_totals)
    if not total > 0:
        raise ZeroLossWeight(
            f"the loss weights of the whole batch sum to {total:g} over {num_dp} data-parallel rank(s): "
            "at least one token must carry loss"
        )
    match mode:
        case Normalize.GLOBAL:
            return [1.0 / total] * len(weights)
        case Normalize.DP:
            own = math.fsum(weights)
            return [1.0 / (own * num_dp) if own else 0.0] * len(weights)
        case Normalize.TOKEN_PER_MICROBATCH | Normalize.MICROBATCH_MEAN:
            # The mean of a microbatch without loss tokens is none, of its auxiliary losses either.
            return [1.0 / (w * len(weights) * num_dp) if w else 0.0 for w in weights]


# ---- Numbers that a loss function reports beside the loss, reduced over microbatches and ranks


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


class LossMetrics:
    """A loss function, and the numbers that it reports in the course of one step or evaluation."""

    #: name -> the microbatches' parts, on this rank
    _parts: dict[str, list[Metric]]
    _loss_fn: LossFn

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn, self._parts = loss_fn, {}

    def __call__(self, output: Any, microbatch: Any) -> Any:
        """The microbatch's loss alone.

        Raises: ValueError where the loss function gives a pair that is not a loss and named `Metric`s.
        """
        given = self._loss_fn(output, microbatch)
        if not isinstance(given, tuple):
            return given
        if len(given) != 2 or not isinstance(given[1], Mapping):
            kinds = ", ".join(type(part).__name__ for part in given)
            raise ValueError(f"loss_fn gave a tuple of ({kinds}); possible are the loss, or the loss and a dict")
        loss, metrics = given
        for name, metric in metrics.items():
            if not isinstance(name, str) or not isinstance(metric, Metric):
                raise ValueError(
                    f"loss_fn reported {name!r} as {type_in_words(metric)}; give names, and a penstock.Metric for "
                    "each, which holds the number and its reduction"
                )
            parts = self._parts.setdefault(name, [])
            if parts and parts[0].reduction != metric.reduction:
                raise ValueError(f"loss_fn reported {name!r} as a {parts[0].reduction} and as a {metric.reduction}")
            parts.append(metric)
        return loss

    def total(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> tuple[float, int]:
        """The sum of all ranks' losses, and the number of names that ranks report; all ranks call it at one point."""
        loss, num_names = pipeline.total_loss(losses, len(self._parts))
        return loss, int(num_names)

    def reduced(self, pipeline: Pipeline, num_names: int) -> dict[str, float]:
        """The numbers by name, the same on every rank; without `num_names` no rank sends anything.

        Raises: ValueError on all ranks where some report a name with different reductions.
        """
        if not num_names:
            return {}
        # Ranks of a tp group have the same ones, which count once.
        own = self._parts if pipeline.grid.tp_rank == 0 else {}
        rows = {name: [str(parts[0].reduction), _numbers(parts)] for name, parts in own.items()}
        with pipeline.recorder.collective("gather the loss's metrics"):
            by_rank = gather_json(rows, pipeline.grid.control)
        found: dict[str, tuple[str, list[Any]]] = {}
        for theirs in by_rank:
            for name, (reduction, numbers) in theirs.items():
                kind, every = found.setdefault(name, (reduction, []))
                if kind != reduction:
                    raise ValueError(f"ranks reported the loss's {name!r} as a {kind} and as a {reduction}")
                every.extend(numbers)
        return {name: _reduce(MetricReduction(kind), numbers) for name, (kind, numbers) in sorted(found.items())}


class EvaluationLoss(float):
    """The loss per unit of weight of an evaluation, with the `metrics` that its loss function reported."""

    #: name -> number, over all batches and ranks
    metrics: Mapping[str, float]

    def __new__(cls, loss: float, metrics: Mapping[str, float] | None = None) -> EvaluationLoss:
        # A copy is made from the number alone, and given the metrics afterwards.
        made = super().__new__(cls, loss)
        made.metrics = dict(metrics or {})
        return made


def _numbers(parts: Iterable[Metric]) -> list[list[float]]:
    """Value and weight of each part."""
    return [[float(part.value), 1.0 if part.weight is None else float(part.weight)] for part in parts]


def _reduce(reduction: MetricReduction, numbers: Sequence[Sequence[float]]) -> float:
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


# ---- The loss of a reward model, which learns from pairs of texts which of the two is better


def comparison_loss(output: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    """The sum over pairs of minus the logarithm of the probability that the better text wins, in nats.

    Args:
        output: the head's outputs [T, 1].
        microbatch: pairs, with a label at the one token of each text that is rated (`PairPacking`).

    Source: the Bradley-Terry model as in arXiv 2203.02155, equation 1.
    """
    rated = microbatch["labels"].to(output.device) != NO_LABEL
    rewards = output[rated, 0].to(torch.promote_types(output.dtype, torch.float32))
    margins = rewards[0::2] - rewards[1::2]
    reported = {"accuracy": (margins > 0).float().mean(), "margin": margins.mean(), "mean_reward": rewards.mean()}
    # Each microbatch has at least one pair.
    return -logsigmoid(margins).sum(), {
        name: Metric(value, "mean", weight=microbatch.num_items) for name, value in reported.items()
    }


def num_pairs(microbatch: PackedBatch) -> float:
    """The loss weight that belongs to `comparison_loss`."""
    return float(microbatch.num_items)
