"""On a GPU attention in 16 bit is that of the formula, for texts longer than a kernel's block, forward and backward."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from penstock.model import CachedRows, CacheSize, Sequences, SlotRows, spare_position
from penstock.model.cuda.flash import FlashAttention
from penstock.schedule import BatchItem
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


@pytest.mark.gpu
@pytest.mark.shows(207)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_rows_of_a_cache(window: int | None, heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Rows of unequal lengths: their beginnings, then parts beside single tokens, and at last those of a slot."""
    num_heads, num_kv_heads, lengths, width = *heads, (290, 3, 700, 130), 64
    counts = (num_heads, num_kv_heads, num_kv_heads)
    texts = [
        [drawn(length, n, width, dtype=dtype, seed=10 * row + i) for i, n in enumerate(counts)]
        for row, length in enumerate(lengths)
    ]
    kernel = FlashAttention(*heads, width, window)
    cache = kernel.new_cache(CacheSize(5, 768, dtype, torch.device(device)))
    for store in (cache.keys, cache.values_RGLK):
        store.fill_(torch.nan)
    ends = [(200, 1, 600, 129), (201, 2, 698, 129), (289, 2, 699, 129)]
    read, found = [0] * 4, [[] for _ in lengths]
    for stops in ends:
        items = [BatchItem(n, n, read[n], stop - read[n], True) for n, stop in enumerate(stops) if stop > read[n]]
        items.sort(key=lambda item: item.length > 1)
        rows = CachedRows.of(items, device)
        parts = [[x[item.start : item.end] for x in texts[item.row]] for item in items]
        q, k, v = (torch.cat([part[i] for part in parts]).to(device) for i in range(3))
        rows.write(cache, k, v)
        means = kernel.cached(q, k, v, cache, rows).split([item.length for item in items])
        for item, mean in zip(items, means, strict=True):
            found[item.row].append(mean)
        read = list(stops)
    # The last token of each, with a dead row behind them.
    q, k, v = (torch.stack([*(text[i][-1] for text in texts), torch.zeros_like(texts[0][i][0])]) for i in range(3))
    slot = SlotRows(0, 768, torch.tensor([*(length - 1 for length in lengths), spare_position(768)]).to(device))
    cache.keys[4], cache.values_RGLK[4] = 0, 0
    slot.write(cache, k.to(device), v.to(device))
    means = kernel.cached(q.to(device), k, v, cache, slot)
    assert means.isfinite().all()
    for row, text in enumerate(texts):
        q, k, v = (x.double() for x in text)
        found[row].append(means[row : row + 1])
        check_close(torch.cat(found[row]), masked_attention(q, k, v, (len(q),), window), dtype)
