"""The main loss of a step: the functions that give it, their calls, and its weight.

`MicrobatchSource.factor` says what it is multiplied by.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Real
from operator import itemgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from penstock.data import NO_LABEL, BatchError, PackedBatch
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.metrics import Metric, note_metrics
from penstock.model import (
    Logits,
    Numbers,
    argument_of,
    check_callable,
    cross_entropy_sum,
    numbers_asked,
    reduction_of_labels,
)
from penstock.model.linear import dtype_of_sums
from penstock.settings import Normalize
from penstock.settings.declare import match, mismatch, type_in_words

_logger = logging.getLogger(__name__)

LossFn = Callable[..., Any]
"""A function from the last stage's output and its microbatch to the sum of the microbatch's losses, a tensor.

Or one of (logits, labels), as `Labels` or if its second parameter is called labels, label, targets or target. It says
by its `reduction` whether it gives the "mean" over tokens with a label or their "sum", as torch's losses do. The mean
is turned into the sum, so that a batch's loss is the mean over its tokens with a label, however it is split.

On a GPU the microbatch's keys of one number for each row, such as labels, are there already. Wider ones it moves with
`.to(output.device)`. Values are read without waiting for the GPU from `microbatch.host`.

Beside it, in a pair, it may give anything: of a dict each `Metric` is a number that it reports under that name, and all
else comes back as it is, microbatch by microbatch. It may ask for `penstock.model.Numbers` by name.
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

    Raises: BatchError for a microbatch without labels.
    """
    if "labels" not in microbatch:
        raise BatchError("labels", "there are none to count; a loss that reads none needs a loss_weight_fn of its own")
    return float((microbatch.host["labels"] != NO_LABEL).sum())


def check_loss_fn(loss_fn: Any, loss_weight_fn: Any) -> None:
    """Refuse a loss or its weight that cannot be called. Raises: ValueError."""
    check_callable("loss_fn", loss_fn, "output, microbatch")
    if (reduction := reduction_of_labels(loss_fn)) == "":
        raise ValueError(
            "loss_fn takes (logits, labels) and does not say what it gives of them; give "
            "Labels(loss_fn, reduction='mean') or 'sum', or let it have an attribute `reduction`, as torch's losses do"
        )
    if reduction not in (None, "mean", "sum"):
        raise ValueError(f"loss_fn has reduction={reduction!r}; a loss of (logits, labels) has 'mean' or 'sum'")
    if reduction is not None and (ignored := argument_of(loss_fn, "ignore_index", NO_LABEL)) != NO_LABEL:
        raise ValueError(f"loss_fn has ignore_index={ignored}; tokens without a label have {NO_LABEL} here")
    if reduction == "mean" and argument_of(loss_fn, "weight", None) is not None:
        raise ValueError("loss_fn has a weight for each class, by which its mean divides; one that gives a sum may")
    check_callable("loss_weight_fn", loss_weight_fn, "microbatch")


def scalar_loss(loss: Any) -> Tensor:
    """Refuse what no step can learn from. Raises: ValueError unless `loss` is one number with its graph."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    what = type_in_words(loss)
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
    raise ValueError(
        f"loss_fn gave {what}; a step learns from the sum of a microbatch's losses, one number with its graph, and "
        "`forward` gives whatever else is to be made of the outputs"
    )


class ZeroLossWeight(ValueError):
    """No token of the whole batch, on any rank, carries loss; raised on all ranks alike, before any backward.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> engine.train_batch(PackedBatch.from_documents([torch.arange(1)]))
    Traceback (most recent call last):
    penstock.engine.training.loss.ZeroLossWeight: the loss weights of the whole batch sum to 0 over 1 ...
    """


def check_total(rank_totals: Sequence[float], num_dp: int, of: str = "the whole batch") -> float:
    """The weight of a whole batch, of all data-parallel ranks. Raises: ZeroLossWeight if it has none."""
    total = math.fsum(rank_totals)
    if not total > 0:
        raise ZeroLossWeight(
            f"the loss weights of {of} sum to {total:g} over {num_dp} data-parallel rank(s): "
            "at least one token must carry loss"
        )
    return total


def divisor_of(normalize: Normalize | str | float) -> Normalize | float:
    """The rule by which a divisor follows from the weights, or the divisor itself. Raises: ValueError for neither."""
    if isinstance(normalize, Normalize):
        return normalize
    if not isinstance(normalize, int | float):
        is_one, rule = match(Normalize, normalize)
        if not is_one:
            raise ValueError(mismatch("normalize", normalize, Normalize))
        return rule
    if isinstance(normalize, bool) or not 0 < normalize < math.inf:
        raise ValueError(f"normalize = {normalize!r} is no divisor of a loss; a number is above 0 and finite")
    return float(normalize)


@dataclass(eq=False)
class BoundLoss:
    """A loss function with its weight and divisor, read once for all steps taken with them."""

    #: gives a microbatch's loss, or that and anything else
    loss_fn: LossFn
    #: gives a microbatch's weight in the divisor
    loss_weight_fn: LossWeightFn
    #: the divisor, or how it follows from the weights; None where losses are only added up
    normalize: Normalize | str | float | None = None

    @cached_property
    def divisor(self) -> Normalize | float | None:
        """See `divisor_of`; None where losses are only added up. Raises: ValueError for what is no divisor."""
        return None if self.normalize is None else divisor_of(self.normalize)

    @cached_property
    def reads_labels(self) -> bool:
        """True for a loss that reads the labels of tokens as classes. Raises: ValueError for what is no loss."""
        check_loss_fn(self.loss_fn, self.loss_weight_fn)
        return self.reads_labelled_rows or self._reduction is not None

    @cached_property
    def reads_labelled_rows(self) -> bool:
        """True for a loss that `labelled_rows` has marked."""
        return reads_labelled_rows(self.loss_fn)

    def weight(self, microbatch: PackedBatch, number: int) -> float:
        """The weight of the microbatch of that number. Raises: ValueError unless it is a finite number from 0 on."""
        weight = self.loss_weight_fn(microbatch)
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise ValueError(f"loss_weight_fn gave {type_in_words(weight)} for microbatch {number}; it gives a number")
        weight = float(weight)
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"loss_weight_fn gave {weight} for microbatch {number}; possible are numbers from 0 on")
        return weight

    @cached_property
    def _numbers_asked(self) -> frozenset[str]:
        return numbers_asked(self.loss_fn)

    @cached_property
    def _reduction(self) -> str | None:
        return reduction_of_labels(self.loss_fn)

    def __call__(self, output: Any, microbatch: Any, numbers: Numbers) -> tuple[Any, Any]:
        """The microbatch's loss, and what is given beside it. Raises: ValueError for a tuple that is no pair."""
        loss_fn = partial(self.loss_fn, **{name: getattr(numbers, name) for name in self._numbers_asked})
        if self._reduction is None:
            result = loss_fn(output, microbatch)
        else:
            result = self._of_labels(loss_fn, output, microbatch)
        loss, beside = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if isinstance(loss, tuple):
            kinds = ", ".join(type(part).__name__ for part in loss)
            raise ValueError(
                f"loss_fn gave a tuple of ({kinds}); possible are the loss, or the loss and one more value, such as a "
                "dict"
            )
        return loss, beside

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
        result = loss_fn(output, labels_T.to(output.device))
        loss, *beside = result if isinstance(result, tuple) and len(result) == 2 else (result,)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type_in_words(loss)
            raise ValueError(
                f"loss_fn(logits, labels) gave {what}; it gives one number, the mean over tokens with a label"
            )
        total = loss.to(dtype_of_sums(loss)) * num if self._reduction == "mean" else loss
        return (total, *beside) if beside else total


@dataclass(eq=False)
class StepLoss:
    """The losses of one step or evaluation, and what their function gives beside them."""

    #: the loss function
    bound: BoundLoss
    #: name -> the microbatches' parts, on this rank
    metrics: dict[str, list[Metric]] = field(default_factory=dict)
    #: microbatch -> what was given that is no `Metric`, None for nothing; of the running step or batch
    _outputs: dict[int, Any] = field(default_factory=dict)

    def __call__(self, output: Any, microbatch: Any, numbers: Numbers) -> Any:
        """The microbatch's loss alone. Raises: ValueError as `BoundLoss` does, or for `Metric`s without names."""
        loss, beside = self.bound(output, microbatch, numbers)
        if isinstance(beside, Mapping):
            metrics = {name: value for name, value in beside.items() if isinstance(value, Metric)}
            note_metrics(self.metrics, metrics)
            beside = {name: value for name, value in beside.items() if name not in metrics} or None
        self._outputs[numbers.microbatch] = tree_map_only(Tensor, Tensor.detach, beside)
        return loss

    def with_warning(self, output: Any, microbatch: Any, numbers: Numbers) -> Any:
        """The microbatch's loss alone, of which one line says where it is a mean that would be divided once more."""
        loss, is_divided = self(output, microbatch, numbers), isinstance(self.bound.divisor, Normalize)
        if numbers.microbatch == 0 and is_divided and self.bound.loss_weight_fn is num_loss_tokens and _is_mean(loss):
            _logger.warning(
                "loss_fn gives the mean of a microbatch's losses, which the number of tokens with a label divides once "
                "more: let it give their sum, or let loss_weight_fn say what its value weighs"
            )
        return loss

    def outputs(self) -> tuple[Any, ...]:
        """All that was given beside losses since the last call, in the order of microbatches; empty for nothing."""
        outputs = tuple(output for _, output in sorted(self._outputs.items(), key=itemgetter(0)))
        self._outputs.clear()
        return outputs if any(output is not None for output in outputs) else ()

    def total(self, pipeline: Pipeline, rank_loss: float) -> tuple[float, int]:
        """The sum of all ranks' losses, and the number of names that ranks report; all ranks call it at one point."""
        sums = (0.0, 0.0)
        # Ranks of a tp group have the same ones, which count once.
        if not pipeline.grid.tp_rank:
            sums = (rank_loss, float(len(self.metrics)))
        loss, num_names = pipeline.sum_over_ranks("add up the loss", *sums)
        return loss, int(num_names)


def _is_mean(loss: Any) -> bool:
    """True where the last operation of a loss takes a mean, by a reduction of torch's losses or by itself."""
    node = getattr(loss, "grad_fn", None)
    while node is not None and node.name() in ("NegBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    # As torch numbers them: none, mean, sum.
    return node is not None and (node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", 0) == 1)


def sum_of(losses: Sequence[Tensor]) -> list[Tensor]:
    """The sum of a rank's losses, on its device; nothing where it has none."""
    return [torch.stack(list(losses)).sum()] if losses else []


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
