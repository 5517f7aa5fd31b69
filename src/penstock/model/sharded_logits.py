"""Logits of which each rank holds a part of the vocabulary, and what is worked out from them without gathering them.

Every rank makes three numbers a token of its own part; these few are exchanged, and all else is local again.

Shapes: T tokens, V vocabulary, U this rank's part of it, P ranks, R rows of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model.blocks import IGNORED, NEVER, TokenGradients, at_least_fp32, blocks, logits_gradient, scaled
from penstock.model.collectives import Collectives
from penstock.model.units import Shard


@dataclass(frozen=True, eq=False)
class ShardedLogits:
    """Logits [T, V] of which this rank holds [T, U]; all ranks of the group make the same calls in the same order.

    own: this rank's part. part: which part of the vocabulary that is, dimension 0 being the vocabulary.
    """

    own: Tensor
    part: Shard
    collectives: Collectives

    @property
    def shape(self) -> torch.Size:
        """Of the whole, [T, V]."""
        return torch.Size((self.own.shape[0], self.part.full_shape[0]))

    @property
    def device(self) -> torch.device:
        return self.own.device

    def gathered(self) -> Tensor:
        """The whole logits [T, V] on every rank, without a graph: V / U times the memory."""
        if not self.own.shape[0]:
            return self.own.new_empty(self.shape)
        longest = -(-self.part.full_shape[0] // self.part.count)
        parts = [Shard("tp", 0, index, self.part.count, self.part.full_shape) for index in range(self.part.count)]
        padded_UT = self.own.new_zeros(longest, self.own.shape[0])
        padded_UT[: self.part.length] = self.own.detach().t()
        every = self.collectives.all_gather(padded_UT).wait().split(longest)
        return torch.cat([rows[: part.length] for rows, part in zip(every, parts, strict=True)]).t().contiguous()


Logits = Tensor | ShardedLogits


def whole_logits(logits: Logits) -> Tensor:
    """The logits [T, V] of the whole vocabulary, without a graph, wherever they are."""
    return logits.gathered() if isinstance(logits, ShardedLogits) else logits.detach()


def sharded_statistics(logits: ShardedLogits, labels_T: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token's label (0 where it is -100), and the entropy of its distribution: both [T].

    Of softmax(logits / temperature), alike on every rank; their gradients are of this rank's part of the logits.
    """
    return _Statistics.apply(logits.own, labels_T, logits, temperature)  # pyright: ignore[reportReturnType]


class _Statistics(torch.autograd.Function):
    """Keeps logits and per token the logarithm of the normaliser and the entropy; recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, own_TU: Tensor, labels_T: Tensor, logits: ShardedLogits, temperature: float
    ) -> tuple[Tensor, Tensor]:
        columns_T = labels_T - logits.part.start
        here_T = (columns_T >= 0) & (columns_T < logits.part.length)
        columns_T = columns_T.where(here_T, 0)
        # Of this rank's part: the logarithm of the sum of exponentials, the label's logit if it lies here, the mean.
        told_3T = own_TU.new_zeros(3, own_TU.shape[0], dtype=at_least_fp32(own_TU))
        for rows in blocks(own_TU):
            z_RU = scaled(own_TU[rows], told_3T.dtype, temperature)
            of_label_R = z_RU.gather(1, columns_T[rows, None]).squeeze(1)
            told_3T[0, rows] = torch.logsumexp(z_RU, -1)
            told_3T[1, rows] = of_label_R.where(here_T[rows], 0)
            told_3T[2, rows] = _mean(z_RU, told_3T[0, rows])
        every_P3T = logits.collectives.all_gather(told_3T).wait().unflatten(0, (-1, 3))
        norms_PT, of_labels_T, means_PT = every_P3T[:, 0], every_P3T[:, 1].sum(0), every_P3T[:, 2]
        norm_T = torch.logsumexp(norms_PT, 0)
        kept_T = labels_T != IGNORED
        entropies_T = norm_T - ((norms_PT - norm_T).exp() * means_PT).sum(0)
        ctx.save_for_backward(own_TU, columns_T, here_T, kept_T, norm_T, entropies_T)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return (of_labels_T - norm_T).where(kept_T, 0), entropies_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        own_TU, columns_T, here_T, kept_T, norm_T, entropies_T = ctx.saved_tensors
        of_log_probs_T, of_entropies_T = grads
        if of_log_probs_T is None and of_entropies_T is None:
            return None, None, None, None
        of_log_probs_T = torch.zeros_like(norm_T) if of_log_probs_T is None else of_log_probs_T.where(kept_T, 0)
        tokens = TokenGradients(norm_T, entropies_T, columns_T, here_T, of_log_probs_T, of_entropies_T)
        return logits_gradient(own_TU, tokens, ctx.temperature), None, None, None


def _mean(z_RU: Tensor, norms_R: Tensor) -> Tensor:
    """The mean of logits under their own softmax; those that never come count nothing, however low they are."""
    log_p_RU = z_RU.sub_(norms_R[:, None])
    return (log_p_RU.exp() * log_p_RU.clamp_(min=NEVER)).sum(-1) + norms_R
