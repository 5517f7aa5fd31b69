"""PyTorch's flash kernels of packed sequences as a formula, which can stand for them on a CPU.

It asks of its arguments what the kernels ask, and keeps and reads what they keep and read.

Shapes: T tokens of queries, H query heads, G key and value heads, K width of a head, L queries of a sequence, S keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Spans = list[tuple[slice, slice]]


def spans(starts: tuple[Tensor, Tensor], longest: tuple[int, int], used: Tensor | None) -> Spans:
    """Each sequence's queries and keys."""
    for numbers in (*starts, *([] if used is None else [used])):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous() and numbers.dim() == 1
    assert len(starts[0]) == len(starts[1]) and (used is None or len(used) == len(starts[0]) - 1)
    q_starts, k_starts = (numbers.tolist() for numbers in starts)
    found = []
    for i in range(len(q_starts) - 1):
        num_keys = k_starts[i + 1] - k_starts[i] if used is None else int(used[i])
        assert 0 <= q_starts[i + 1] - q_starts[i] <= longest[0] and 0 <= num_keys <= longest[1]
        found.append((slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i] + num_keys)))
    return found


def scores(q_LHK: Tensor, k_SGK: Tensor, seen: tuple[int, int]) -> Tensor:
    """[H, L, S] in fp64, -inf where a query does not see a key; the last query is as far as the last key."""
    k_SHK = k_SGK.double().repeat_interleave(q_LHK.shape[1] // k_SGK.shape[1], 1)
    behind_LS = torch.arange(len(k_SHK) - len(q_LHK), len(k_SHK))[:, None] - torch.arange(len(k_SHK))
    before, after = seen
    hidden_LS = (behind_LS < -after) if after >= 0 else torch.zeros_like(behind_LS, dtype=torch.bool)
    if before >= 0:
        hidden_LS = hidden_LS | (behind_LS > before)
    return torch.einsum("lhk,shk->hls", q_LHK.double() * q_LHK.shape[-1] ** -0.5, k_SHK).masked_fill(
        hidden_LS, -torch.inf
    )


def seen_of(is_causal: bool, before: int | None, after: int | None) -> tuple[int, int]:
    """The tokens before and after its own that a query sees; -1 for all."""
    return -1 if before is None else before, 0 if is_causal else -1 if after is None else after


def forward(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    *numbers: Any,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, ...]:
    longest_q, longest_k, dropout, is_causal, _ = numbers
    assert dropout == 0 and q_THK.shape[-1] % 8 == 0 and all(x.stride(-1) == 1 for x in (q_THK, k_TGK, v_TGK))
    seen, num_heads = seen_of(is_causal, window_size_left, window_size_right), q_THK.shape[1]
    out_THK = torch.full(q_THK.shape, torch.nan, dtype=torch.float64)
    lse_HT = torch.full((num_heads, len(q_THK)), torch.nan, dtype=torch.float64)
    for q, k in spans((q_starts, k_starts), (longest_q, longest_k), seqused_k):
        scores_HLS = scores(q_THK[q], k_TGK[k], seen)
        lse_HT[:, q] = scores_HLS.logsumexp(-1)
        v_SHK = v_TGK[k].double().repeat_interleave(num_heads // k_TGK.shape[1], 1)
        out_THK[q] = torch.einsum("hls,shk->lhk", scores_HLS.softmax(-1), v_SHK)
    nothing = torch.empty(0, dtype=torch.uint64)
    lse_HT = lse_HT if q_THK.dtype == torch.float64 else lse_HT.float()
    return out_THK.to(q_THK.dtype), lse_HT, nothing, nothing, torch.empty(0, dtype=q_THK.dtype)


def backward(
    grad_THK: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    out_THK: Tensor,
    lse_HT: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    *numbers: Any,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    longest_q, longest_k, dropout, is_causal, *_ = numbers
    assert dropout == 0
    seen, heads = seen_of(is_causal, window_size_left, window_size_right), (k_TGK.shape[1], -1)
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (q_THK, k_TGK, v_TGK)]
    for q, k in spans((q_starts, k_starts), (longest_q, longest_k), None):
        p_HLS = (scores(q_THK[q], k_TGK[k], seen) - lse_HT[:, q, None].double()).exp()
        grad, out = grad_THK[q].double(), out_THK[q].double()
        k_SHK, v_SHK = (x[k].double().repeat_interleave(q_THK.shape[1] // x.shape[1], 1) for x in (k_TGK, v_TGK))
        pull_HL1 = (grad * out).sum(-1).T[..., None]
        grad_scores = p_HLS * (torch.einsum("lhk,shk->hls", grad, v_SHK) - pull_HL1) * q_THK.shape[-1] ** -0.5
        grads[0][q] = torch.einsum("hls,shk->lhk", grad_scores, k_SHK)
        grads[1][k] = torch.einsum("hls,lhk->shk", grad_scores, q_THK[q].double()).unflatten(1, heads).sum(2)
        grads[2][k] = torch.einsum("hls,lhk->shk", p_HLS, grad).unflatten(1, heads).sum(2)
    grad_q, grad_k, grad_v = (grad.to(q_THK.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Within this context the formula stands for the kernels where tensors are on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
