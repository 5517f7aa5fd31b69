"""Attention over packed sequences written out with masks, in whatever precision it is given."""

import torch
from torch import Tensor

from penstock.model import Sequences
from penstock.model.attention.kernels import AttentionKernel

PACKINGS = [(1,), (6,), (4, 4, 4), (5, 1, 9), (3, 3, 8, 8, 3)]


def inputs(num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def heads(count: int) -> Tensor:
        return torch.randn(num_tokens, count, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return heads(num_heads), heads(num_kv_heads), heads(num_kv_heads)


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


def assert_equal_to_masked(kernel: AttentionKernel, lengths: tuple[int, ...]) -> None:
    """Output and gradients of a kernel over packed sequences of these lengths."""
    heads = kernel.num_heads, kernel.num_kv_heads
    qkv = inputs(sum(lengths), *heads, torch.float64)
    weights = torch.linspace(-1, 1, sum(lengths) * 8 * heads[0], dtype=torch.float64).view(-1, heads[0], 8)
    out = kernel.packed(*qkv, Sequences.from_lengths(lengths))
    expected = masked_attention(*qkv, lengths, kernel.window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(out, qkv, weights)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, qkv, weights), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
