"""The loss of a step: the default loss function and its weight, and what the loss is divided by.

A loss function gives the *sum* of a microbatch's losses, g, and gradients are summed over microbatches and
data-parallel ranks, never averaged. So the mode of normalisation is one factor f for each microbatch, known before any
backward, and the loss of the step is the sum of g * f over all microbatches and data-parallel ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from penstock.data import NO_LABEL, PackedBatch
from penstock.model import Logits, cross_entropy_sum
from penstock.settings import Normalize
from penstock.settings.arguments import type_in_words

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
    penstock.engine.losses.ZeroLossWeight: the loss weights of the whole batch sum to 0 over 1 ...
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
