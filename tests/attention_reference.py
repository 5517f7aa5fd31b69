"""Attention over packed sequences written out with masks, in whatever precision it is given."""

import torch
from torch import Tensor


def masked_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None) -> Tensor:
    """One softmax over all tokens, with everything masked that a token must not see."""
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    index = torch.arange(len(sequence))
    distance = index[:, None] - index[None]
    seen = (sequence[:, None] == sequence[None]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
