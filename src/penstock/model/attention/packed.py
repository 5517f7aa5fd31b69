"""Causal attention over packed sequences of unequal lengths, by PyTorch's own kernels and without padding.

Runs of adjacent sequences of equal length are one call of `scaled_dot_product_attention`; usually that is the whole
microbatch. On a GPU in 16 bit all lengths are one call of the variable-length kernel. Results depend on the
microbatch alone.

Shapes: T tokens of the microbatch, N sequences of a run, L tokens of each of them, H heads, K width of a head.
"""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.sequences import Sequences


def packed_attention(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, sequences: Sequences, window: int | None) -> Tensor:
    """Each token's mean of the values it sees: of its own sequence, not after it, `window` tokens with itself.

    Keys and values may have fewer heads than queries (grouped queries: H is a multiple of theirs). Gives [T, H, K].
    """
    kernel = _variable_length_kernel() if q_THK.is_cuda and q_THK.dtype in (torch.float16, torch.bfloat16) else None
    if kernel is not None:
        starts, longest = sequences.cu_seqlens, sequences.max_length
        left = -1 if window is None else window - 1
        grouped = q_THK.shape[1] != k_THK.shape[1]
        return kernel(q_THK, k_THK, v_THK, starts, starts, longest, longest, window_size=(left, 0), enable_gqa=grouped)
    runs = [(length, len(list(same))) for length, same in groupby(sequences.lengths)]
    if len(runs) == 1:
        return _attention_of_run(q_THK, k_THK, v_THK, runs[0], window, sequences)
    # split, not slices: its gradient is one concatenation, while that of a slice is a zero tensor of full size.
    sizes = [length * count for length, count in runs]
    parts = zip(runs, q_THK.split(sizes), k_THK.split(sizes), v_THK.split(sizes), strict=True)
    return torch.cat([_attention_of_run(q, k, v, run, window, sequences) for run, q, k, v in parts])


def _attention_of_run(
    q: Tensor, k: Tensor, v: Tensor, run: tuple[int, int], window: int | None, sequences: Sequences
) -> Tensor:
    """Attention of adjacent sequences of one length, (length, how many) in `run`; [N * L, H, K] in and out."""
    length, count = run
    q_NHLK, k_NHLK, v_NHLK = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
    mask_LL = None
    if window is not None and window < length:
        mask_LL = sequences.shared(("window", length, window), lambda: _window_mask(length, window, q.device))
    out_NHLK = F.scaled_dot_product_attention(
        q_NHLK, k_NHLK, v_NHLK, mask_LL, is_causal=mask_LL is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out_NHLK.transpose(1, 2).flatten(0, 1)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L], true where the row's token sees the column's."""
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)


@cache
def _variable_length_kernel() -> Callable[..., Tensor] | None:
    """PyTorch's kernel for packed sequences, where this release has it with windows and grouped queries."""
    # Its module loads the compiler, which takes a second that a run on CPUs need not spend.
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
    return varlen_attn if has else None  # pyright: ignore[reportReturnType]
