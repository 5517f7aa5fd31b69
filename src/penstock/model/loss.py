"""Cross entropy, log-probabilities and entropies of tokens, for whole logits and for logits cut by vocabulary.

Everything goes through the logits a block of rows at a time, so no fp32 copy of all logits is ever made, and at most
two numbers per token are kept beside the logits. All results have gradients. For logits cut by vocabulary every rank
computes and exchanges three numbers per token; the rest is local.

Shapes: T tokens, V vocabulary, U this rank's part of it, P ranks, R rows of a block.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.linear import dtype_of_sums, with_gradient
from penstock.model.sequences import IGNORED
from penstock.parallel.collectives import Collectives
from penstock.parallel.tensor_slice import Shard

NEVER = -1e4
"""Replaces the log-probability of an impossible token: times its probability, which is 0, it stays 0."""

_CPU_BLOCK_ELEMENTS = 1 << 18
"""Logits of a block: 1 MiB of fp32, which stays in a core's cache from one operation to the next."""

_GPU_BLOCK_ELEMENTS = 1 << 26
"""Logits of a block on a GPU, where a launch costs more than memory traffic: 256 MiB of fp32."""


def blocks(logits_TV: Tensor) -> list[slice]:
    """The rows of each block, in order; each block has at least one."""
    num_elements = _CPU_BLOCK_ELEMENTS if logits_TV.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    num_rows = max(1, num_elements // logits_TV.shape[1])
    return [slice(first, first + num_rows) for first in range(0, logits_TV.shape[0], num_rows)]


def scaled(logits_RV: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """A new tensor with the block divided by the temperature."""
    return logits_RV.to(dtype, copy=True).div_(temperature)


@dataclass(frozen=True, eq=False)
class ShardedLogits:
    """Logits [T, V] of which this rank holds [T, U]; all ranks of the group make the same calls in the same order."""

    #: this rank's part [T, U]
    own: Tensor
    #: the part of the vocabulary that this is; dimension 0 is the vocabulary
    part: Shard
    collectives: Collectives

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole, [T, V]."""
        return torch.Size((self.own.shape[0], self.part.full_shape[0]))

    @property
    def device(self) -> torch.device:
        return self.own.device

    def gathered(self) -> Tensor:
        """The whole logits [T, V] on every rank, without a graph; they take V / U times the memory."""
        if not self.own.shape[0]:
            return self.own.new_empty(self.shape)
        longest = -(-self.part.full_shape[0] // self.part.count)
        parts = [Shard("tp", 0, index, self.part.count, self.part.full_shape) for index in range(self.part.count)]
        padded_UT = self.own.new_zeros(longest, self.own.shape[0])
        padded_UT[: self.part.length] = self.own.detach().t()
        every = self.collectives.all_gather(padded_UT).wait().split(longest)
        return torch.cat([rows[: part.length] for rows, part in zip(every, parts, strict=True)]).t().contiguous()

    def statistics(self, labels_T: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's log-probability of its label (0 where it is -100), normaliser's logarithm and entropy, all [T].

        They are equal on every rank.
        """
        columns_T, here_T = columns_of(labels_T, self.part)
        # For this rank's part: the logarithm of the sum of exponentials, the label's logit if it is here, the mean.
        own_3T = self.own.new_zeros(3, self.own.shape[0], dtype=dtype_of_sums(self.own))
        for rows in blocks(self.own):
            z_RU = scaled(self.own[rows], own_3T.dtype, temperature)
            of_label_R = z_RU.gather(1, columns_T[rows, None]).squeeze(1)
            own_3T[0, rows] = torch.logsumexp(z_RU, -1)
            own_3T[1, rows] = of_label_R.where(here_T[rows], 0)
            # The mean under the part's own softmax; logits of probability 0 add nothing, however low they are.
            log_p_RU = z_RU.sub_(own_3T[0, rows, None])
            own_3T[2, rows] = (log_p_RU.exp() * log_p_RU.clamp_(min=NEVER)).sum(-1) + own_3T[0, rows]
        every_P3T = self.collectives.all_gather(own_3T).wait().unflatten(0, (-1, 3))
        norms_PT, of_labels_T, means_PT = every_P3T[:, 0], every_P3T[:, 1].sum(0), every_P3T[:, 2]
        norm_T = torch.logsumexp(norms_PT, 0)
        entropies_T = norm_T - ((norms_PT - norm_T).exp() * means_PT).sum(0)
        return (of_labels_T - norm_T).where(labels_T != IGNORED, 0), norm_T, entropies_T


Logits = Tensor | ShardedLogits


def whole_logits(logits: Logits) -> Tensor:
    """The logits [T, V] of the whole vocabulary, without a graph."""
    return logits.gathered() if isinstance(logits, ShardedLogits) else logits.detach()


def cross_entropy_sum(logits_TV: Logits, labels_T: Tensor) -> Tensor:
    """The sum of the tokens' cross entropies in nats, a scalar in fp32 (fp64 for fp64 logits).

    Tokens with label -100 are ignored. Nothing of size [T, V] is kept for backward but the logits themselves.
    `ShardedLogits` are not gathered; the sum is the same on all ranks.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(logits_TV, labels_T)
    if isinstance(logits_TV, ShardedLogits):
        return -token_log_probs(logits_TV, labels_T).sum()

    def forward(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        total = logits_TV.new_zeros((), dtype=dtype_of_sums(logits_TV))
        for rows in blocks(logits_TV):
            labels_R = labels_T[rows]
            kept_R = labels_R != IGNORED
            log_p_RV = logits_TV[rows].log_softmax(-1, dtype=total.dtype)
            of_labels_R = log_p_RV.gather(1, labels_R.clamp(min=0)[:, None]).squeeze(1)
            total -= torch.where(kept_R, of_labels_R, 0).sum()
        return total, (logits_TV, labels_T)

    def backward(grad: Tensor, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, None]:
        grad_TV = torch.empty_like(logits_TV)
        for rows in blocks(logits_TV):
            labels_R, grad_RV = labels_T[rows], grad_TV[rows]
            factor_R1 = torch.where(labels_R != IGNORED, grad, 0)[:, None]
            p_RV = grad_RV if grad_RV.dtype == grad.dtype else torch.empty_like(grad_RV, dtype=grad.dtype)
            torch.softmax(logits_TV[rows], -1, dtype=p_RV.dtype, out=p_RV)
            p_RV.mul_(factor_R1).scatter_add_(1, labels_R.clamp(min=0)[:, None], -factor_R1)
            if p_RV is not grad_RV:
                grad_RV.copy_(p_RV)
        return grad_TV, None

    return with_gradient(forward, backward, logits_TV, labels_T)


class TokenStatistics(NamedTuple):
    """Statistics of each token in nats, [T] in fp32 (fp64 for fp64 logits)."""

    #: of the labels; 0 where the label is -100
    log_probs: Tensor
    #: of the distributions
    entropies: Tensor


def token_log_probs(logits_TV: Logits, labels_T: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of each token's label under softmax(logits / temperature): [T] in fp32 (fp64 for fp64).

    It is 0, without a gradient, for tokens whose label is -100.

    Raises:
        ValueError: the shapes do not fit, or the temperature is not positive.
    """
    _check(logits_TV, labels_T, temperature)
    return _TokenStatistics.of(logits_TV, labels_T, temperature, False)[0]


def token_statistics(logits_TV: Logits, labels_T: Tensor, temperature: float = 1.0) -> TokenStatistics:
    """`token_log_probs` and the entropy of each token's distribution, in one pass over the logits.

    Entropies do not depend on the labels; tokens whose label is -100 have one too.

    Raises:
        ValueError: the shapes do not fit, or the temperature is not positive.
    """
    _check(logits_TV, labels_T, temperature)
    return TokenStatistics(*_TokenStatistics.of(logits_TV, labels_T, temperature, True))


class _TokenStatistics(torch.autograd.Function):
    """Keeps the logits, the labels, and each token's normaliser and entropy; recomputes the rest in backward.

    Gradients are those of the logits that are here: all, or this rank's part.
    """

    @staticmethod
    def of(logits: Logits, labels_T: Tensor, temperature: float, with_entropies: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, which are empty without `with_entropies` unless they cost nothing."""
        sharded, own = (logits, logits.own) if isinstance(logits, ShardedLogits) else (None, logits)
        return _TokenStatistics.apply(own, labels_T, sharded, temperature, with_entropies)  # pyright: ignore[reportReturnType]

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        sharded: ShardedLogits | None,
        temperature: float,
        with_entropies: bool,
    ) -> tuple[Tensor, Tensor]:
        if sharded is not None:
            log_probs_T, log_norms_T, entropies_T = sharded.statistics(labels_T, temperature)
        else:
            log_probs_T, log_norms_T, entropies_T = whole_statistics(logits_TV, labels_T, temperature, with_entropies)
        ctx.save_for_backward(logits_TV, labels_T, log_norms_T, entropies_T)
        ctx.temperature, ctx.part, ctx.with_entropies = temperature, sharded and sharded.part, with_entropies
        ctx.set_materialize_grads(False)
        if not with_entropies:
            ctx.mark_non_differentiable(entropies_T)
        return log_probs_T, entropies_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        """The gradient of the logits [T, V], or of this rank's part [T, U].

        With z = logits / temperature, p = softmax(z) and H its entropy:
        d log p(label) / dz = onehot(label) - p, and dH / dz = -p (log p + H).
        """
        logits_TV, labels_T, log_norms_T, entropies_T = ctx.saved_tensors
        of_log_probs_T, of_entropies_T = grads[0], grads[1] if ctx.with_entropies else None
        if of_log_probs_T is None and of_entropies_T is None:
            return None, None, None, None, None
        if of_log_probs_T is None:
            of_log_probs_T = torch.zeros_like(log_norms_T)
        of_log_probs_T = of_log_probs_T.where(labels_T != IGNORED, 0)
        columns_T, here_T = columns_of(labels_T, ctx.part)
        of_labels_T, grad_TV = of_log_probs_T.where(here_T, 0), torch.empty_like(logits_TV)
        for rows in blocks(logits_TV):
            log_p_RV = scaled(logits_TV[rows], log_norms_T.dtype, ctx.temperature).sub_(log_norms_T[rows, None])
            grad_RV, of_log_probs_R1 = log_p_RV.exp().neg_(), of_log_probs_T[rows, None]
            if of_entropies_T is None:
                grad_RV.mul_(of_log_probs_R1)
            else:
                above_RV = log_p_RV.clamp_(min=NEVER).add_(entropies_T[rows, None])
                grad_RV.mul_(above_RV.mul_(of_entropies_T[rows, None]).add_(of_log_probs_R1))
            grad_RV.scatter_add_(1, columns_T[rows, None], of_labels_T[rows, None])
            grad_TV[rows] = grad_RV.div_(ctx.temperature)
        return grad_TV, None, None, None, None


def columns_of(labels_T: Tensor, part: Shard | None) -> tuple[Tensor, Tensor]:
    """Each label's column among the logits that are here, and true if it is one of them; 0 for all others."""
    if part is None:
        return labels_T.clamp(min=0), labels_T != IGNORED
    columns_T = labels_T - part.start
    here_T = (columns_T >= 0) & (columns_T < part.length)
    return columns_T.where(here_T, 0), here_T


def whole_statistics(
    logits_TV: Tensor, labels_T: Tensor, temperature: float, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ShardedLogits.statistics`, of whole logits; without `with_entropies` the entropies are empty."""
    num_tokens, dtype = logits_TV.shape[0], dtype_of_sums(logits_TV)
    log_probs_T, log_norms_T = (logits_TV.new_empty(num_tokens, dtype=dtype) for _ in range(2))
    entropies_T = logits_TV.new_empty(num_tokens if with_entropies else 0, dtype=dtype)
    for rows in blocks(logits_TV):
        z_RV, labels_R = scaled(logits_TV[rows], dtype, temperature), labels_T[rows]
        # As in cross entropy and in sampling: one function gives all three the same bits.
        log_p_RV = z_RV.log_softmax(-1)
        log_norms_T[rows] = z_RV.amax(-1) - log_p_RV.amax(-1)
        of_labels_R = log_p_RV.gather(1, labels_R.clamp(min=0)[:, None]).squeeze(1)
        log_probs_T[rows] = torch.where(labels_R != IGNORED, of_labels_R, 0)
        if with_entropies:
            p_RV = log_p_RV.exp()
            entropies_T[rows] = p_RV.mul_(log_p_RV.clamp_(min=NEVER)).sum(-1).neg_()
    return log_probs_T, log_norms_T, entropies_T


def _check(logits_TV: Logits, labels_T: Tensor, temperature: float = 1.0) -> None:
    if len(logits_TV.shape) != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"logits have shape {tuple(logits_TV.shape)} and labels {tuple(labels_T.shape)}: "
            "needed are [tokens, vocabulary] and [tokens]"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: it must be positive; 1 leaves the distribution as it is")
