"""Cross entropy as a sum over tokens, in fp32, without an fp32 copy of the logits.

Shapes: T tokens, V vocabulary, R rows of a block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.model.blocks import IGNORED, at_least_fp32, rows_of_block
from penstock.model.sharded_logits import Logits, ShardedLogits, sharded_statistics


class _CrossEntropySum(torch.autograd.Function):
    """sum over tokens of log(sum(exp(logits))) - logits[label]; keeps the logits as they are and recomputes."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        ctx.save_for_backward(logits_TV, labels_T)
        total = logits_TV.new_zeros((), dtype=at_least_fp32(logits_TV))
        for logits_RV, labels_R in _blocks(logits_TV, labels_T):
            kept_R = labels_R != IGNORED
            log_p_RV = logits_RV.log_softmax(-1, dtype=total.dtype)
            of_labels_R = log_p_RV.gather(1, labels_R.clamp(min=0)[:, None]).squeeze(1)
            total -= torch.where(kept_R, of_labels_R, 0).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits_TV, labels_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        rows = _blocks(logits_TV, labels_T)
        for (logits_RV, labels_R), grad_RV in zip(rows, grad_TV.split(rows_of_block(logits_TV)), strict=True):
            factor_R1 = torch.where(labels_R != IGNORED, grads[0], 0)[:, None]
            p_RV = grad_RV if grad_RV.dtype == grads[0].dtype else torch.empty_like(grad_RV, dtype=grads[0].dtype)
            torch.softmax(logits_RV, -1, dtype=p_RV.dtype, out=p_RV)
            p_RV.mul_(factor_R1).scatter_add_(1, labels_R.clamp(min=0)[:, None], -factor_R1)
            if p_RV is not grad_RV:
                grad_RV.copy_(p_RV)
        return grad_TV, None


def cross_entropy_sum(logits_TV: Logits, labels_T: Tensor) -> Tensor:
    """Sum of the tokens' cross entropies in nats, a scalar in fp32 (fp64 for fp64 logits); -100 has none.

    From the logits to their gradient nothing of size [T, V] is kept but the logits themselves. Those of which every
    rank holds a part are not gathered, and the sum is the same on all ranks.

    Raises:
        ValueError: the shapes do not fit.
    """
    if len(logits_TV.shape) != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"logits have shape {tuple(logits_TV.shape)} and labels {tuple(labels_T.shape)}: "
            "needed are [tokens, vocabulary] and [tokens]"
        )
    if isinstance(logits_TV, ShardedLogits):
        return -sharded_statistics(logits_TV, labels_T)[0].sum()
    return _CrossEntropySum.apply(logits_TV, labels_T)  # pyright: ignore[reportReturnType]


def _blocks(logits_TV: Tensor, labels_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    num_rows = rows_of_block(logits_TV)
    return zip(logits_TV.split(num_rows), labels_T.split(num_rows), strict=True)
