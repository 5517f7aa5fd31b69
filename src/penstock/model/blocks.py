"""Rows of logits worked on block by block, so that no fp32 copy of all of them is ever made.

Shapes: T tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that has no loss."""

NEVER = -1e4
"""Stands for the log-probability of a token that can not come: times its probability, which is 0, it stays 0."""

_CPU_BLOCK_ELEMENTS = 1 << 18
"""Logits worked on at a time: 1 MiB of fp32, so that they stay in a core's cache from one operation to the next."""

_GPU_BLOCK_ELEMENTS = 1 << 26
"""The same where launching costs more than memory traffic: 256 MiB of fp32."""


def rows_of_block(logits_TV: Tensor) -> int:
    """How many tokens' logits are worked on at a time; at least one."""
    num_elements = _CPU_BLOCK_ELEMENTS if logits_TV.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    return max(1, num_elements // logits_TV.shape[1])


def at_least_fp32(logits_TV: Tensor) -> torch.dtype:
    """The dtype that a softmax of these logits is computed in."""
    return torch.promote_types(logits_TV.dtype, torch.float32)


def blocks(logits_TV: Tensor) -> list[slice]:
    """The rows of each block, in order."""
    num_rows = rows_of_block(logits_TV)
    return [slice(first, first + num_rows) for first in range(0, logits_TV.shape[0], num_rows)]


def scaled(logits_RV: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """The block over the temperature, in a tensor of its own."""
    return logits_RV.to(dtype, copy=True).div_(temperature)


@dataclass(frozen=True, eq=False)
class TokenGradients:
    """What the gradient of log-probabilities and entropies needs of each token, all [T].

    log_norms: logarithm of the normaliser. entropies: of the distributions. columns: where the label's logit stands.
    here: whether it stands among these logits at all. of_log_probs: gradients, 0 for tokens without a label.
    of_entropies: gradients, or None where nobody asks for them.
    """

    log_norms: Tensor
    entropies: Tensor
    columns: Tensor
    here: Tensor
    of_log_probs: Tensor
    of_entropies: Tensor | None


def logits_gradient(logits_TV: Tensor, tokens: TokenGradients, temperature: float) -> Tensor:
    """The gradient of the logits [T, V], or of a part of the vocabulary's.

    With z = logits / temperature, p = softmax(z) and H its entropy:
    d log p(label) / dz = onehot(label) - p, and dH / dz = -p (log p + H).
    """
    grad_TV = torch.empty_like(logits_TV)
    of_labels_T = tokens.of_log_probs.where(tokens.here, 0)
    for rows in blocks(logits_TV):
        log_p_RV = scaled(logits_TV[rows], tokens.log_norms.dtype, temperature).sub_(tokens.log_norms[rows, None])
        grad_RV, of_log_probs_R1 = log_p_RV.exp().neg_(), tokens.of_log_probs[rows, None]
        if tokens.of_entropies is None:
            grad_RV.mul_(of_log_probs_R1)
        else:
            above_RV = log_p_RV.clamp_(min=NEVER).add_(tokens.entropies[rows, None])
            grad_RV.mul_(above_RV.mul_(tokens.of_entropies[rows, None]).add_(of_log_probs_R1))
        grad_RV.scatter_add_(1, tokens.columns[rows, None], of_labels_T[rows, None])
        grad_TV[rows] = grad_RV.div_(temperature)
    return grad_TV
