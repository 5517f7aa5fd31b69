"""Attention whose bits for a token depend on its sequence alone, not on what else is computed with it.

A kernel takes one query by another order of operations than many, and a long row of keys by another than a short one.
So keys are taken in tiles, counted from the first token of the sequence, which are whole multiples of a vector; queries
are never fewer than `FEW_ROWS`, those that are missing being zeros; and the tiles' results are added in their order.
What a query does not see counts as an exact zero, so tiles and parts of tiles beyond it change no bit.

Only products of fewer keys than `TILE_KEYS` are added up in one order for any number of queries on all CPUs tried;
`penstock.model.cpu.reproducible` checks it on the CPU at hand.

Shapes: T tokens of a batch, N sequences or rows, L queries of each, S keys, B keys of a tile, R rows of the cache,
H query heads, G key and value heads, Q = H / G, K width of a head, P tiles.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cpu.host_memory import lazy_zeros
from penstock.model.kv_cache import CachedRows, CacheSize, KVCache, SlotRows
from penstock.model.linear import with_gradient
from penstock.model.sequences import SharedByLayers
from penstock.schedule import BatchItem

TILE_KEYS = 128
WHOLE = 32
"""Lengths are rounded up to multiples of this number: a whole number of vectors on any CPU."""

FEW_ROWS = 4
"""The least number of queries of one product."""

_KEYS_OF_A_CALL = 128
"""A call of the kernel takes as long as it needs for so many keys of a row."""


def rounded_up(length: int) -> int:
    """The length with what is missing to whole vectors."""
    return -(-length // WHOLE) * WHOLE


def _attention_of_run(
    q: Tensor, k: Tensor, v: Tensor, run: tuple[int, int], window: int | None, sequences: SharedByLayers
) -> Tensor:
    """Attention of adjacent sequences of one length, `run` being (length, number)."""
    length, count = run
    missing = rounded_up(length) - length
    shaped = [F.pad(x.unflatten(0, (count, length)), (0, 0, 0, 0, 0, missing)).transpose(1, 2) for x in (q, k, v)]

    def forward(*qkv: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out_NHLK, lse_NHL = _causal(*qkv)
        return out_NHLK, (*qkv, out_NHLK, lse_NHL)

    def backward(grad_NHLK: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The gradient is that of the kernel for all keys at once.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_NHLK, *kept, 0.0, True)

    out_NHLK = with_gradient(forward, backward, *shaped) if torch.is_grad_enabled() else _causal(*shaped)[0]
    return out_NHLK[:, :, :length].transpose(1, 2).flatten(0, 1)


class TiledAttention(AttentionKernel):
    """Attention in fixed tiles of keys, without a window."""

    run = staticmethod(_attention_of_run)

    def new_cache(self, size: CacheSize) -> KVCache:
        return KVCache(size, self.num_kv_heads, self.head_dim, lazy_zeros)

    def singles(self, q_SHK: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        parts, begin = [], 0
        for run in rows.shared("runs by tiles", lambda: _runs(rows.items[: rows.num_single])):
            end, longest = begin + len(run), max(item.end for item in run)
            seen = rows.shared(("seen", begin, longest), partial(_seen, rows.positions[begin:end, None], longest))
            parts.append(_attention_of_rows(q_SHK[begin:end], cache, slice(run[0].row, run[-1].row + 1), seen))
            begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def slot(self, q_RHK: Tensor, cache: KVCache, rows: SlotRows) -> Tensor:
        seen = rows.shared("seen by tiles", lambda: _seen(rows.positions[:, None], rows.num_seen))
        return _attention_of_rows(q_RHK, cache, slice(rows.first, rows.first + rows.num_tokens), seen)

    def item(self, q_LHK: Tensor, cache: KVCache, item: BatchItem, rows: CachedRows) -> Tensor:
        positions_1L = torch.arange(item.start, item.end)[None]
        seen = rows.shared(("seen by item", item.start, item.end), partial(_seen, positions_1L, item.end))
        padded = F.pad(q_LHK, (0, 0, 0, 0, 0, rounded_up(item.length) - item.length)).transpose(0, 1)[None]
        own = slice(item.row, item.row + 1)
        return _attention_over(padded, cache, own, seen)[0, :, : item.length].transpose(0, 1)


def _causal(q_NHLK: Tensor, k_NGLK: Tensor, v_NGLK: Tensor) -> tuple[Tensor, Tensor]:
    """Means and the logarithms of the sums of exponentials; a query sees the keys up to its own."""
    # The kernel counts rows and columns from the same corner, so queries after a tile see all of it.
    parts = [
        _kernel(q_NHLK[:, :, first:], k_NGLK[:, :, first:end], v_NGLK[:, :, first:end], causal=True)
        for first, end in _tiles(k_NGLK.shape[2])
    ]
    return _added(parts)


def _tiles(num_keys: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, num_keys, TILE_KEYS), num_keys]))


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _added(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The tiles' means and log-sum-exps added up in order; a later tile may be that of the last queries alone.

    Products and sums are separate operations, because only the rounding of each does not depend on how it is computed.
    """
    if len(parts) == 1:
        return parts[0]
    longest = parts[0][1].shape[2]
    lse_PNHL = torch.stack([F.pad(lse, (longest - lse.shape[2], 0), value=-torch.inf) for _, lse in parts])
    highest_NHL = lse_PNHL.amax(0)
    weights_PNHL = lse_PNHL.sub_(highest_NHL).exp_()
    out_NHLK, sum_NHL = parts[0][0] * weights_PNHL[0, ..., None], weights_PNHL[0]
    for (part_NHLK, _), weights_NHL in zip(parts[1:], weights_PNHL[1:], strict=True):
        own = slice(longest - part_NHLK.shape[2], None)
        out_NHLK[:, :, own] += part_NHLK * weights_NHL[:, :, own, None]
        sum_NHL = sum_NHL + weights_NHL
    return out_NHLK.div_(sum_NHL[..., None]), sum_NHL.log().add_(highest_NHL)


# ---- over the KV cache


def _runs(items: Sequence[BatchItem]) -> list[list[BatchItem]]:
    """Group items of one token in neighbouring rows.

    All rows of a run read as many keys as its longest, so that one that is much shorter begins a run.
    """
    runs: list[list[BatchItem]] = []
    longest = 0
    for item in items:
        length = rounded_up(item.end)
        # The keys that the run, or else this row, would read for nothing.
        unread = max(0, length - longest) * len(runs[-1]) + max(0, longest - length) if runs else 0
        if runs and runs[-1][-1].row + 1 == item.row and unread <= _KEYS_OF_A_CALL:
            runs[-1].append(item)
            longest = max(longest, length)
        else:
            runs.append([item])
            longest = length
    return runs


Seen = list[tuple[slice, tuple[Tensor, Tensor] | None]]
"""Each tile's keys, and which of them the queries see: None for all, or the additive mask [R, 1, L, B], which is not
repeated for heads, and true for the queries [R, 1, L] that see any."""


def _seen(positions_RL: Tensor, longest: int) -> Seen:
    """The tiles of keys that queries at these positions see, the last one being before `longest`."""
    length = positions_RL.shape[1]
    # The queries that fill up a text see what its last one sees: each sum is that of something.
    missing = 0 if length == 1 else rounded_up(length) - length
    padded_RL = torch.cat([positions_RL, positions_RL[:, -1:].expand(-1, missing)], 1)
    found: Seen = []
    for first, end in _tiles(rounded_up(longest)):
        sees = (torch.arange(first, end, device=positions_RL.device) <= padded_RL[..., None])[:, None]
        if bool(sees.all()):
            found.append((slice(first, end), None))
        else:
            mask = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, -torch.inf)
            found.append((slice(first, end), (mask, sees.any(-1))))
    return found


def _attention_of_rows(q_RHK: Tensor, cache: KVCache, own: slice, seen: Seen) -> Tensor:
    """The means [R, H, K] of rows of the cache that read one token each."""
    # The queries of a group are the rows of one product: nothing is repeated for them.
    q_RGQK = q_RHK.unflatten(1, (cache.values_RGLK.shape[1], -1))
    num_queries = q_RGQK.shape[2]
    padded = F.pad(q_RGQK, (0, 0, 0, max(0, FEW_ROWS - num_queries)))
    return _attention_over(padded, cache, own, seen)[:, :, :num_queries].flatten(1, 2)


def _attention_over(q_RHLK: Tensor, cache: KVCache, own: slice, seen: Seen) -> Tensor:
    parts = []
    for keys, sees in seen:
        mask = None if sees is None else sees[0].expand(-1, -1, q_RHLK.shape[2], -1)
        out, lse = _kernel(q_RHLK, cache.keys_of(own, keys), cache.values_RGLK[own, :, keys], mask)
        # The kernel gives 0 for the sum of nothing; the first tile is seen by all.
        parts.append((out, lse if sees is None or not parts else lse.where(sees[1], -torch.inf)))
    return _added(parts)[0]
