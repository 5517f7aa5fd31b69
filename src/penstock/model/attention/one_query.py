"""Attention of a single token to the keys and values of its sequence, as each step of generation needs it.

PyTorch's kernel is made for many queries. For one query on a CPU it multiplies by a routine that reads matrices at half
the speed of memory, and 16-bit ones at a quarter. So keys and values of 16 bits are widened to fp32 first, and the
products of few keys are written out. Microseconds for 4 rows of 8 heads and 96 tokens of 64 numbers that are not in a
processor's own cache, on an AMD EPYC with AVX-512 (reading them alone takes 60 in fp32): 151 by the kernel in fp32, 115
here; 268 by the kernel in bf16, 134 here.

Shapes: R rows, G key and value heads, Q queries that share them, L tokens that are seen, K width of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_KEYS = 256
"""Beyond so many, the products of all heads are too large for a processor's own cache."""


def attention_of_one(q_RGQK: Tensor, k_RGLK: Tensor, v_RGLK: Tensor) -> Tensor:
    """The mean [R, G, Q, K] of all these values; a row's bits are those of that row alone."""
    if q_RGQK.device.type != "cpu":
        return F.scaled_dot_product_attention(q_RGQK, k_RGLK, v_RGLK)
    q, k, v = widened(q_RGQK), widened(k_RGLK), widened(v_RGLK)
    if q.shape[2] > 1 or k.shape[2] > _FEW_KEYS:
        return F.scaled_dot_product_attention(q, k, v).to(q_RGQK.dtype)
    scores_RGL = (k * (q * q.shape[-1] ** -0.5)).sum(-1)
    return (scores_RGL.softmax(-1)[:, :, None] @ v).to(q_RGQK.dtype)


def widened(x: Tensor) -> Tensor:
    """16-bit numbers on a CPU as fp32; all others as they are."""
    return x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x
