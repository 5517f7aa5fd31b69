"""The main loss of a step: the functions that give it, their calls, its weight, and what it is divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from penstock.data import NO_LABEL, PackedBatch
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.metrics import Metric, MetricReduction, reduced_number
from penstock.engine.training.microbatches import AgreedSplit
from penstock.model import Logits, cross_entropy_sum, numbers_asked, reduction_of_labels
from penstock.model.linear import dtype_of_sums
from penstock.parallel.host import gather_json
from penstock.settings import Normalize
from penstock.settings.declare import type_in_words, words_of

LossFn = Callable[..., Any]
"""A function from the last stage's output and its microbatch to the sum of the microbatch's losses, a tensor.

Or one of (logits, labels), as `Labels` or if its second parameter is called labels, label, targets or target. It says
by its `reduction` whether it gives the "mean" over tokens with a label or their "sum", as torch's losses do. The mean
is turned into the sum, so that a batch's loss is the mean over its tokens with a label, however it is split.

Beside it, in a pair, it may give anything: of a dict each `Metric` is a number that it reports under that name, and all
else comes back as it is, microbatch by microbatch. It may ask for `penstock.model.NUMBERS` by name.
"""

LossWeightFn = Callable[[PackedBatch], float]
"""A microbatch's weight in the denominator."""


Function = TypeVar("Function", bound=Callable[..., Any])


def labelled_rows(function: Function) -> Function:
    """Mark a loss, or the hook of a `PerToken`, as one to which tokens without a label make no difference.

    A model of Penstock or transformers then computes no logits for them where many tokens have no label: it gives the
    outputs of those with a label, and the same rows of the microbatch's keys; where there is none, one row without. A
    loss without the mark is given all tokens.

    >>> @labelled_rows
    ... def loss_fn(logits, microbatch):
    ...     return torch.nn.functional.cross_entropy(logits, microbatch["labels"], reduction="sum")
    """
    marked: Any = function if isinstance(function, FunctionType | nn.Module) else partial(function)
    marked.reads_labelled_rows = True
    return marked


def reads_labelled_rows(function: Any) -> bool:
    """True for what `labelled_rows` has marked."""
    return bool(getattr(function, "reads_labelled_rows", False))


def reads_labels(loss_fn: Any) -> bool:
    """True for a loss that reads the labels of tokens as classes."""
    return reads_labelled_rows(loss_fn) or reduction_of_labels(loss_fn) is not None


@labelled_rows
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
    penstock.engine.training.loss.ZeroLossWeight: the loss weights of the whole batch sum to 0 over 1 ...
    """


def check_total(total: float, num_dp: int) -> None:
    """Refuse a whole batch, of all data-parallel ranks, without any loss weight. Raises: ZeroLossWeight."""
    if not total > 0:
        raise ZeroLossWeight(
            f"the loss weights of the whole batch sum to {total:g} over {num_dp} data-parallel rank(s): "
            "at least one token must carry loss"
        )


def loss_factors(mode: Normalize | float, weights: Sequence[float], rank_totals: Sequence[float]) -> list[float]:
    """The factor of each of this rank's microbatches.

    Args:
        mode: how the divisor follows from the weights, or the divisor itself.
        weights: loss weight of each microbatch on this data-parallel rank.
        rank_totals: sum of the weights on each data-parallel rank, this one included.

    Raises:
        ZeroLossWeight: all totals are zero.
    """
    if isinstance(mode, float):
        return [1.0 / mode] * len(weights)
    assert isinstance(mode, Normalize)
    num_dp, total = len(rank_totals), math.fsum(rank_totals)
    check_total(total, num_dp)
    match mode:
        case Normalize.GLOBAL:
            return [1.0 / total] * len(weights)
        case Normalize.DP:
            own = math.fsum(weights)
            return [1.0 / (own * num_dp) if own else 0.0] * len(weights)
        case Normalize.TOKEN_PER_MICROBATCH | Normalize.MICROBATCH_MEAN:
            # The mean of a microbatch without loss tokens is none, of its auxiliary losses either.
            return [1.0 / (w * len(weights) * num_dp) if w else 0.0 for w in weights]


def loss_factor(
    pipeline: Pipeline,
    agreed: AgreedSplit,
    loss_weight_fn: LossWeightFn,
    normalize: Normalize | str | float,
    loss_scale: float,
) -> Callable[[int], float]:
    """The factor on the loss of this rank's microbatch of a number; 0 where no labels are seen."""
    mode = Normalize.parse(normalize) if not isinstance(normalize, Normalize | int | float) else normalize
    mode = mode if isinstance(mode, Normalize) else float(mode)
    num_cp, context, weights, totals = pipeline.layout.cp, pipeline.context, agreed.weights, None
    if agreed.is_drawn:
        # Weights come as microbatches are drawn, and none counts for another.
        ones = [1.0] * pipeline.layout.dp
        return lambda i: loss_factors(mode, [weights[i]] * agreed.num, ones)[0] * loss_scale if weights else 0.0
    if mode is Normalize.MICROBATCH_MEAN and context is not None:
        # Here each context-parallel rank counts as a rank, with the mean of its part of every microbatch.
        parts = [context.shard(m)[0] for m in agreed.split.microbatches if weights]
        weights = [float(loss_weight_fn(part)) for part in parts]
        totals = [total for total in agreed.rank_totals for _ in range(num_cp)]
    factors = loss_factors(mode, weights, totals or agreed.rank_totals)
    return lambda i: factors[i] * loss_scale if factors else 0.0


@dataclass(eq=False)
class LossMetrics:
    """A loss function, and what it gives beside losses in the course of one step or evaluation."""

    #: gives a microbatch's loss, or that and anything else
    loss_fn: LossFn
    #: name -> the microbatches' parts, on this rank
    _parts: dict[str, list[Metric]] = field(default_factory=dict)
    #: microbatch -> what was given that is no `Metric`, None for nothing; of the running step or batch
    _outputs: dict[int, Any] = field(default_factory=dict)

    @cached_property
    def _asked(self) -> frozenset[str]:
        return numbers_asked(self.loss_fn)

    @cached_property
    def _reduction(self) -> str | None:
        return reduction_of_labels(self.loss_fn)

    def __call__(self, output: Any, microbatch: Any, numbers: Mapping[str, int]) -> Any:
        """The microbatch's loss alone. numbers: its `NUMBERS`.

        Raises: ValueError where the loss function gives a tuple that is no pair, or `Metric`s without names.
        """
        loss_fn = partial(self.loss_fn, **{name: numbers[name] for name in self._asked})
        try:
            call = loss_fn if self._reduction is None else partial(self._of_labels, loss_fn)
            given = call(output, microbatch)
        except StopIteration as error:
            # The engine's generators would take it for an end of their own.
            raise RuntimeError("loss_fn: StopIteration, as next() raises it at the end of an iterator") from error
        except (TypeError, AttributeError) as error:
            if self._reduction is None and type(microbatch).__name__ in words_of(error):
                raise type(error)(
                    f"{words_of(error)}; loss_fn is given the microbatch, with its labels as microbatch['labels']: "
                    "give Labels(loss_fn, reduction='mean') or 'sum', to have it given these alone"
                ) from error
            raise
        loss, beside = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if isinstance(loss, tuple):
            kinds = ", ".join(type(part).__name__ for part in loss)
            raise ValueError(
                f"loss_fn gave a tuple of ({kinds}); possible are the loss, or the loss and one more value, such as a "
                "dict"
            )
        metrics: dict[Any, Metric] = {}
        if isinstance(beside, Mapping):
            metrics = {name: value for name, value in beside.items() if isinstance(value, Metric)}
            beside = {name: value for name, value in beside.items() if name not in metrics} or None
        self._outputs[numbers["microbatch"]] = tree_map_only(Tensor, Tensor.detach, beside)
        for name, metric in metrics.items():
            if not isinstance(name, str):
                raise ValueError(f"loss_fn reported a Metric under {name!r}; give each a name")
            parts = self._parts.setdefault(name, [])
            if parts and parts[0].reduction != metric.reduction:
                raise ValueError(f"loss_fn reported {name!r} as a {parts[0].reduction} and as a {metric.reduction}")
            parts.append(metric)
        return loss

    def _of_labels(self, loss_fn: LossFn, output: Any, microbatch: PackedBatch) -> Any:
        """The sum of the losses of a microbatch's tokens, by a loss of (logits, labels), and what it gives beside.

        Raises: ValueError where it cannot be known from what it gives.
        """
        labels_T = microbatch["labels"]
        # The batch has values where a rehearsal's tensors have none.
        with _disable_current_modes():
            num = num_loss_tokens(microbatch)
        if not isinstance(output, Tensor) or output.shape[:1] != labels_T.shape:
            what = f"a tensor of {list(output.shape)}" if isinstance(output, Tensor) else type_in_words(output)
            raise ValueError(
                f"loss_fn takes logits and labels, of which a microbatch has {len(labels_T)}, but the last layer gave "
                f"{what}; give a function of (output, microbatch)"
            )
        if not num:
            # The mean of nothing is none.
            return output[:0].sum(dtype=dtype_of_sums(output))
        given = loss_fn(output, labels_T.to(output.device))
        loss, *beside = given if isinstance(given, tuple) and len(given) == 2 else (given,)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type_in_words(loss)
            raise ValueError(
                f"loss_fn(logits, labels) gave {what}; it gives one number, the mean over tokens with a label"
            )
        total = loss.to(dtype_of_sums(loss)) * num if self._reduction == "mean" else loss
        return (total, *beside) if beside else total

    def outputs(self) -> tuple[Any, ...]:
        """All that was given beside losses since the last call, in the order of microbatches; empty for nothing."""
        found = tuple(own for _, own in sorted(self._outputs.items(), key=itemgetter(0)))
        self._outputs.clear()
        return found if any(own is not None for own in found) else ()

    def total(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> tuple[float, int]:
        """The sum of all ranks' losses, and the number of names that ranks report; all ranks call it at one point."""
        # Ranks of a tp group have the same ones, which count once.
        own = (0.0, 0.0)
        if not pipeline.grid.tp_rank:
            own = (float(torch.stack(list(losses)).sum()) if losses else 0.0, float(len(self._parts)))
        loss, num_names = pipeline.sum_over_ranks(*own)
        return loss, int(num_names)

    def reduced(self, pipeline: Pipeline, num_names: int) -> dict[str, float]:
        """The numbers by name, the same on every rank; without `num_names` no rank sends anything.

        Raises: ValueError on all ranks where some report a name with different reductions.
        """
        if not num_names:
            return {}
        # Ranks of a tp group have the same ones, which count once.
        own = self._parts if pipeline.grid.tp_rank == 0 else {}
        # Value and weight of each part.
        rows = {
            name: [
                str(parts[0].reduction),
                [[float(part.value), 1.0 if part.weight is None else float(part.weight)] for part in parts],
            ]
            for name, parts in own.items()
        }
        with pipeline.recorder.collective("gather the loss's metrics"):
            by_rank = gather_json(rows, pipeline.grid.control)
        found: dict[str, tuple[str, list[Any]]] = {}
        for theirs in by_rank:
            for name, (reduction, numbers) in theirs.items():
                kind, every = found.setdefault(name, (reduction, []))
                if kind != reduction:
                    raise ValueError(f"ranks reported the loss's {name!r} as a {kind} and as a {reduction}")
                every.extend(numbers)
        return {name: reduced_number(MetricReduction(kind), numbers) for name, (kind, numbers) in sorted(found.items())}


class EvaluationLoss(float):
    """The loss per unit of weight of an evaluation, with the `metrics` that its loss function reported."""

    #: name -> number, over all batches and ranks
    metrics: Mapping[str, float]
    #: what else it gave, as `TrainResult.outputs`, one batch after another
    outputs: Sequence[Any]

    @property
    def loss(self) -> float:
        """The number itself, by the name that a step's result has for it."""
        return float(self)

    def __new__(
        cls, loss: float, metrics: Mapping[str, float] | None = None, outputs: Sequence[Any] = ()
    ) -> EvaluationLoss:
        # A copy is made from the number alone, and given the rest afterwards.
        made = super().__new__(cls, loss)
        made.metrics, made.outputs = dict(metrics or {}), outputs
        return made


# ---- The loss of a reward model, which learns from pairs of texts which of the two is better


@labelled_rows
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
