"""The variable-length kernel of a GPU computes what the masks say."""

import pytest
import torch

from penstock.model import Sequences
from penstock.model.attention.kernels import packed_attention
from tests.attention_reference import masked_attention


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1,), (64, 64), (5, 1, 90)], ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_and_gradients(
    lengths: tuple[int, ...], num_kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    qkv = [
        torch.randn(num_tokens, heads, 32, generator=generator).to(dtype) for heads in (4, num_kv_heads, num_kv_heads)
    ]
    grad = torch.randn(num_tokens, 4, 32, generator=generator).to(dtype)
    exact_qkv = [x.double().requires_grad_() for x in qkv]
    exact = masked_attention(exact_qkv[0], exact_qkv[1], exact_qkv[2], lengths, window)
    q, k, v = device_qkv = [x.cuda().requires_grad_() for x in qkv]
    out = packed_attention(q, k, v, Sequences.from_lengths(lengths, "cuda"), window)
    assert out.dtype == dtype
    # Weights and results are rounded to the dtype; sums of up to 90 gradients of size one each grow their rounding.
    limit = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double().cpu(), exact, rtol=limit, atol=limit)
    wanted = torch.autograd.grad(exact, exact_qkv, grad.double())
    for value, expected in zip(torch.autograd.grad(out, device_qkv, grad.cuda()), wanted, strict=True):
        torch.testing.assert_close(value.double().cpu(), expected, rtol=limit, atol=limit)
