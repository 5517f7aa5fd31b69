"""Log-probabilities of tokens, and entropies of the distributions they are drawn from, without an fp32 copy of logits.

Both have a gradient, so that a policy can be trained through them: forward and backward go through the logits a block
of rows at a time and keep, beside the logits themselves, two numbers a token.

Logits of which every rank holds a part of the vocabulary will do as well, and are not gathered.

Shapes: T tokens, V vocabulary, R rows of a block.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.model.blocks import IGNORED, NEVER, TokenGradients, at_least_fp32, blocks, logits_gradient, scaled
from penstock.model.sharded_logits import Logits, ShardedLogits, sharded_statistics


class TokenStatistics(NamedTuple):
    """What the logits say of each token, in nats; fp32 (fp64 for fp64 logits).

    log_probs: [T], of the labels; 0 where the label is -100. entropies: [T], of the distributions.
    """

    log_probs: Tensor
    entropies: Tensor


def token_log_probs(logits_TV: Logits, labels_T: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(label) of each token, p = softmax(logits / temperature): [T] in fp32 (fp64 for fp64 logits).

    Tokens whose label is -100 have 0, and give no gradient.

    Raises:
        ValueError: the shapes do not fit, or the temperature is not positive.
    """
    _check(logits_TV, labels_T, temperature)
    if isinstance(logits_TV, ShardedLogits):
        return sharded_statistics(logits_TV, labels_T, temperature)[0]
    return _Statistics.apply(logits_TV, labels_T, temperature, False)[0]  # pyright: ignore[reportOptionalSubscript]


def token_statistics(logits_TV: Logits, labels_T: Tensor, temperature: float = 1.0) -> TokenStatistics:
    """`token_log_probs`, and the entropy of each token's distribution in the same pass over the logits.

    Entropies do not depend on the labels: tokens whose label is -100 have theirs as well.

    Raises:
        ValueError: the shapes do not fit, or the temperature is not positive.
    """
    _check(logits_TV, labels_T, temperature)
    if isinstance(logits_TV, ShardedLogits):
        return TokenStatistics(*sharded_statistics(logits_TV, labels_T, temperature))
    return TokenStatistics(*_Statistics.apply(logits_TV, labels_T, temperature, True))  # pyright: ignore[reportArgumentType]


class _Statistics(torch.autograd.Function):
    """Keeps logits, labels, and per token the logarithm of the normaliser and the entropy; recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, temperature: float, with_entropies: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens, dtype = logits_TV.shape[0], at_least_fp32(logits_TV)
        log_probs_T, log_norms_T = (logits_TV.new_empty(num_tokens, dtype=dtype) for _ in range(2))
        entropies_T = logits_TV.new_empty(num_tokens if with_entropies else 0, dtype=dtype)
        for rows in blocks(logits_TV):
            z_RV = scaled(logits_TV[rows], dtype, temperature)
            log_norms_T[rows] = torch.logsumexp(z_RV, -1)
            log_p_RV, labels_R = z_RV.sub_(log_norms_T[rows, None]), labels_T[rows]
            of_labels_R = log_p_RV.gather(1, labels_R.clamp(min=0)[:, None]).squeeze(1)
            log_probs_T[rows] = torch.where(labels_R != IGNORED, of_labels_R, 0)
            if with_entropies:
                p_RV = log_p_RV.exp()
                entropies_T[rows] = p_RV.mul_(log_p_RV.clamp_(min=NEVER)).sum(-1).neg_()
        ctx.save_for_backward(logits_TV, labels_T, log_norms_T, entropies_T)
        ctx.temperature, ctx.with_entropies = temperature, with_entropies
        ctx.set_materialize_grads(False)
        if not with_entropies:
            ctx.mark_non_differentiable(entropies_T)
        return log_probs_T, entropies_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits_TV, labels_T, log_norms_T, entropies_T = ctx.saved_tensors
        of_log_probs_T, of_entropies_T = grads[0], grads[1] if ctx.with_entropies else None
        if of_log_probs_T is None and of_entropies_T is None:
            return None, None, None, None
        of_log_probs_T = torch.zeros_like(log_norms_T) if of_log_probs_T is None else of_log_probs_T
        of_labels_T = torch.where(labels_T != IGNORED, of_log_probs_T, 0)
        columns_T, here_T = labels_T.clamp(min=0), labels_T != IGNORED
        tokens = TokenGradients(log_norms_T, entropies_T, columns_T, here_T, of_labels_T, of_entropies_T)
        return logits_gradient(logits_TV, tokens, ctx.temperature), None, None, None


def _check(logits_TV: Logits, labels_T: Tensor, temperature: float) -> None:
    if len(logits_TV.shape) != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"logits have shape {tuple(logits_TV.shape)} and labels {tuple(labels_T.shape)}: "
            "needed are [tokens, vocabulary] and [tokens]"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: it must be positive; 1 leaves the distribution as it is")
