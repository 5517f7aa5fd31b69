"""On a GPU attention in 16 bit is that of the formula, for texts longer than a kernel's block, forward and backward."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from penstock.model import Sequences
from penstock.model.cuda.flash import FlashAttention
from tests import flash_reference
from tests.attention_reference import masked_attention

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def formula(device: str) -> Iterator[None]:
    with flash_reference.on_the_cpu() if device == "cpu" else nullcontext():
        yield


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of size one on the host, which this dtype can hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Raises: AssertionError where they differ by more than rounding in the midst of the computation explains."""
    # Gradients are differences of products of size one; a key too many in a window of 100 makes a tenth.
    size = max(float(exact.norm()), exact.numel() ** 0.5 / 4)
    assert float((found.cpu().double() - exact).norm()) <= 4 * torch.finfo(dtype).eps * size


@pytest.mark.gpu
@pytest.mark.shows(207)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 72])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 100, 5000])
def test_packed_sequences(
    window: int | None, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> None:
    lengths = (300, 1, 129, 64, 64, 517)
    counts = (heads[0], heads[1], heads[1], heads[0])
    q, k, v, grad = (drawn(sum(lengths), n, head_dim, dtype=dtype, seed=seed) for seed, n in enumerate(counts))
    on_device = q_THK, k_TGK, v_TGK = tuple(x.to(device).requires_grad_() for x in (q, k, v))
    kernel, sequences = FlashAttention(*heads, head_dim, window), Sequences.from_lengths(lengths, device)
    out = kernel.packed(q_THK, k_TGK, v_TGK, sequences)
    assert out.dtype == dtype
    exact = q_THK, k_TGK, v_TGK = tuple(x.double().requires_grad_() for x in (q, k, v))
    expected = masked_attention(q_THK, k_TGK, v_TGK, lengths, window)
    check_close(out.detach(), expected.detach(), dtype)
    gradients = torch.autograd.grad(out, on_device, grad.to(device))
    for found, wanted in zip(gradients, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        check_close(found, wanted, dtype)
