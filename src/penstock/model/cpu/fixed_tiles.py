"""Attention whose bits for a token depend on its sequence alone, not on what else is computed with it.

A kernel takes one query by another order of operations than many, and a long row of keys by another than a short one.
So keys are taken in tiles, counted from the first token of the sequence, which are whole multiples of a vector; queries
are never fewer than `FEW_ROWS`, those that are missing being zeros; and the tiles' results are added in their order.
What a query does not see counts as an exact zero, so tiles and parts of tiles beyond it change no bit.

The kernel takes as long for one query as for four. So single tokens of several rows are read all at once, as sums of
weighted rows (`blocked_cache.BlockReads`), with the kernel's own exponentials and its orders of addition.

Only products of fewer keys than `TILE_KEYS` are added up in one order for any number of queries on all CPUs tried;
`penstock.model.cpu.reproducible` checks it on the CPU at hand.

Shapes: T tokens of a batch, N sequences or rows, L queries of each, S keys, B keys of a tile or of a block, R rows of
the cache, H query heads, G key and value heads, Q = H / G, K width of a head, P tiles, X blocks that are read.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cpu.blocked_cache import BLOCK_TOKENS, BlockedCache, BlockReads, weighted_sums
from penstock.model.cpu.host_memory import lazy_zeros
from penstock.model.kv_cache import CachedRows, CacheSize, KVCache, Rows, SlotRows
from penstock.model.linear import with_gradient
from penstock.model.sequences import Sequences
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


class TiledAttention(AttentionKernel):
    """Attention in fixed tiles of keys, without a window."""

    def packed(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sequences: Sequences) -> Tensor:
        return tiled_attention(q_THK, k_TGK, v_TGK, sequences)

    def new_cache(self, size: CacheSize) -> KVCache:
        if reads_by_blocks(size.num_rows, self.num_heads // self.num_kv_heads, self.head_dim):
            return BlockedCache(size, self.num_kv_heads, self.head_dim)
        return KVCache(size, self.num_kv_heads, self.head_dim, lazy_zeros)

    def cached(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cache: KVCache, rows: Rows) -> Tensor:
        return tiled_cached_attention(q_THK, k_TGK, v_TGK, cache, rows)


def tiled_attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sequences: Sequences) -> Tensor:
    """Causal attention [T, H, K] within each sequence."""
    runs = [(length, len(list(same))) for length, same in groupby(sequences.lengths)]
    sizes = [length * count for length, count in runs]
    parts = zip(runs, q_THK.split(sizes), k_TGK.split(sizes), v_TGK.split(sizes), strict=True)
    means = [_attention_of_run(run, qkv) for run, *qkv in parts]
    return means[0] if len(means) == 1 else torch.cat(means)


def _attention_of_run(run: tuple[int, int], qkv: Sequence[Tensor]) -> Tensor:
    """Attention of adjacent sequences of one length, `run` being (length, number)."""
    length, count = run
    missing = rounded_up(length) - length
    shaped = [F.pad(x.unflatten(0, (count, length)), (0, 0, 0, 0, 0, missing)).transpose(1, 2) for x in qkv]

    def forward(*qkv: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out_NHLK, lse_NHL = _causal(*qkv)
        return out_NHLK, (*qkv, out_NHLK, lse_NHL)

    def backward(grad_NHLK: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The gradient is that of the kernel for all keys at once.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_NHLK, *kept, 0.0, True)

    out_NHLK = with_gradient(forward, backward, *shaped) if torch.is_grad_enabled() else _causal(*shaped)[0]
    return out_NHLK[:, :, :length].transpose(1, 2).flatten(0, 1)


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


def tiled_cached_attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cache: KVCache, rows: Rows) -> Tensor:
    """Each token's mean [T, H, K] of the values up to its own, which are in the cache already."""
    if isinstance(rows, SlotRows):
        own = slice(rows.first, rows.first + rows.num_tokens)
        seen = rows.shared("seen by tiles", lambda: _seen(rows.positions[:, None], rows.num_seen))
        return _attention_of_rows(q_THK, cache, own, seen)
    parts, begin = [], 0
    if isinstance(cache, BlockedCache) and rows.num_single:
        begin = rows.num_single
        key = ("tiles at once", cache.keys.shape, q_THK.shape[1])
        attend = rows.shared(key, lambda: _tiles_at_once(rows.items[:begin], cache, q_THK.shape[1]))
        parts.append(attend(q_THK[:begin], cache))
    others = rows.items[begin:]
    for run in rows.shared(("runs by tiles", begin), lambda: _runs(others)):
        length, num_tokens = run[0].length, sum(item.length for item in run)
        of_run = slice(begin, begin + num_tokens)
        begin += num_tokens
        if length > 1 and run[0].start == 0:
            # What these texts see is at hand.
            parts.append(_attention_of_run((length, len(run)), [x[of_run] for x in (q_THK, k_TGK, v_TGK)]))
            continue
        own, q = slice(run[0].row, run[-1].row + 1), q_THK[of_run]
        positions_RL = rows.positions[of_run].view(len(run), -1)
        longest = max(item.end for item in run)
        seen = rows.shared(("seen", of_run.start, longest), partial(_seen, positions_RL, longest))
        if length == 1:
            parts.append(_attention_of_rows(q, cache, own, seen))
        else:
            # One row of the cache, which reads several tokens.
            padded = F.pad(q, (0, 0, 0, 0, 0, rounded_up(num_tokens) - num_tokens)).transpose(0, 1)[None]
            parts.append(_attention_over(padded, cache, own, seen)[0, :, :num_tokens].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(items: Sequence[BatchItem]) -> list[list[BatchItem]]:
    """Group the items in order: those of one token in neighbouring rows together, and those of more that begin alike.

    All rows of a run read as many keys as its longest, so that one that is much shorter begins a run. Texts that go on
    after what is in the cache are alone.
    """
    runs: list[list[BatchItem]] = []
    longest = 0
    for item in items:
        last, own = runs[-1][-1] if runs else None, rounded_up(item.end)
        begin = joins = False
        if last is not None and last.length == item.length:
            begin = item.length > 1 and last.start == item.start == 0
            joins = item.length == 1 and last.row + 1 == item.row
        # The keys that the run, or else this row, would read for nothing.
        unread = max(0, own - longest) * len(runs[-1]) + max(0, longest - own) if joins else 0
        if begin or (joins and unread <= _KEYS_OF_A_CALL):
            runs[-1].append(item)
            longest = max(longest, own)
        else:
            runs.append([item])
            longest = own
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
        keys_RGLK, values_RGLK = cache.keys_of(own, keys), cache.values_RGLK[own, :, keys]
        # Where blocks are transposed the kernel would read number by number.
        keys_RGLK = keys_RGLK if keys_RGLK.stride(-1) == 1 else keys_RGLK.contiguous()
        out, lse = _kernel(q_RHLK, keys_RGLK, values_RGLK, mask)
        # The kernel gives 0 for the sum of nothing; the first tile is seen by all.
        parts.append((out, lse if sees is None or not parts else lse.where(sees[1], -torch.inf)))
    return _added(parts)[0]


# ---- single tokens of several rows, over a cache by blocks


_FEW_CACHED_ROWS = 3
"""Up to so many rows the kernel takes less time, though three of its four queries are zeros."""


def reads_by_blocks(num_rows: int, num_queries: int, width: int) -> bool:
    """True if a CPU's cache of so many rows is best kept by blocks, for so many queries of a key."""
    return num_rows > _FEW_CACHED_ROWS and num_queries < FEW_ROWS and _same_bits(width, torch.get_num_threads())


@lru_cache
def _same_bits(width: int, num_threads: int) -> bool:
    """True if rows that are read at once have the kernel's bits on this CPU, with this many threads."""
    lengths, generator = (2 * TILE_KEYS + 37, 1, TILE_KEYS, 90), torch.Generator().manual_seed(0)
    size = CacheSize(len(lengths), rounded_up(max(lengths)), torch.float32, torch.device("cpu"))
    caches = KVCache(size, 2, width), BlockedCache(size, 2, width)
    for row, length in enumerate(lengths):
        keys, values = 3 * torch.randn(2, length, 2, width, generator=generator)
        for cache in caches:
            cache.put(row, slice(0, length), keys, values)
    rows = CachedRows.of([BatchItem(row, row, length - 1, 1, sampled=True) for row, length in enumerate(lengths)])
    queries = torch.randn(len(lengths), 2, width, generator=generator)
    return torch.equal(*(tiled_cached_attention(queries, queries, queries, cache, rows) for cache in caches))


def _tiles_at_once(
    items: Sequence[BatchItem], like: BlockedCache, num_heads: int
) -> Callable[[Tensor, BlockedCache], Tensor]:
    """Attention [R, H, K] of items of one token each, however long, to a cache by blocks."""
    num_tiles = -(-max(item.end for item in items) // TILE_KEYS)
    # Each tile of each row, tile by tile: the row's place, first token and end.
    tiles = [
        (place, first, min(item.end, first + TILE_KEYS))
        for first in range(0, num_tiles * TILE_KEYS, TILE_KEYS)
        for place, item in enumerate(items)
        if first < item.end
    ]
    places, firsts, ends = zip(*tiles, strict=True)
    counts = [-(-(end - first) // BLOCK_TOKENS) for _, first, end in tiles]
    parts = [(items[place].row, first // BLOCK_TOKENS, count) for (place, first, _), count in zip(tiles, counts)]
    reads = like.reads(tuple(parts), num_heads)
    values, value_starts, sees_XB, seen = reads.seen(num_heads, firsts, ends)
    hidden_XB = ~sees_XB
    scale = torch.tensor(like.values_RGLK.shape[-1] ** -0.5, dtype=torch.float32)
    orders = partial(_orders, tiles, counts, len(items), num_heads, reads)
    queries_X, vectors, vector_starts, ones, own_P, highest_each, sums = reads.shared(("tiles", *places), orders)
    # To make a view takes as long as a small operation.
    highest_of_heads = highest_each.view(len(tiles) * num_heads, -1)
    halves = [sums[:, : 2 * half].chunk(2, 1) for half in (8, 4, 2, 1) if 2 * half <= sums.shape[1]]
    num_sums, total = sums.shape[1], sums[:, :1]

    def attend(q_RHK: Tensor, cache: BlockedCache) -> Tensor:
        scores_XB = reads.scores(cache, q_RHK.flatten(0, 1).index_select(0, queries_X))
        # What is left of other texts may be no number, of which a sum with a mask is none either.
        scores_XB.mul_(scale).masked_fill_(hidden_XB, -torch.inf)
        highest_each.index_copy_(0, reads.places_X, scores_XB.amax(1))
        highest = highest_of_heads.amax(1)
        weights_XB = exponential_(scores_XB.sub_(highest.index_select(0, reads.queries_X)[:, None]))
        sums.copy_(torch.embedding_bag(weights_XB.view(-1, num_sums), vectors, vector_starts, False, 0, False, ones)[0])
        for half, other in halves:
            half.add_(other)
        out = weighted_sums(cache.values_RGLK, values, value_starts, weights_XB.take(seen)).mul_(total.reciprocal())
        if num_tiles == 1:
            return out.view(q_RHK.shape)
        # The logarithm is that of one number at a time, as the kernel's is.
        lse = torch.xlogy(_ONE, sums[:, 0]).add_(highest)
        shape = num_tiles * len(items), num_heads
        out_PRHK = out.new_zeros(*shape, q_RHK.shape[-1]).index_copy_(0, own_P, out.view(len(tiles), num_heads, -1))
        lse_PRH = out.new_full(shape, -torch.inf).index_copy_(0, own_P, lse.view(len(tiles), num_heads))
        parts = zip(out_PRHK[:, :, None].split(len(items)), lse_PRH[..., None].split(len(items)), strict=True)
        return _added(list(parts))[0][:, :, 0]

    return attend


def _orders(
    tiles: Sequence[tuple[int, int, int]], counts: Sequence[int], num_rows: int, num_heads: int, reads: BlockReads
) -> tuple[Tensor, ...]:
    """The order of everything that does not change from token to token, and two tensors to compute in.

    It is: each block's query among those of all rows and heads; the vectors of exponentials, the first of each tile and
    head, and their weights; and the place of each tile among as many of all rows. One layer after the other computes
    the highest score of each block, and as many sums of exponentials as the kernel: as a vector has numbers.
    """
    num_sums = _vector_numbers()
    counts_PH = torch.tensor(counts).repeat_interleave(num_heads) * (BLOCK_TOKENS // num_sums)
    heads_PH = torch.tensor([place for place, *_ in tiles])[:, None] * num_heads + torch.arange(num_heads)
    return (
        heads_PH.flatten().index_select(0, reads.queries_X),
        torch.arange(int(counts_PH.sum())),
        counts_PH.cumsum(0) - counts_PH,
        torch.ones(int(counts_PH.sum())),
        torch.tensor([first // TILE_KEYS * num_rows + place for place, first, _ in tiles]),
        torch.full((reads.num_places,), -torch.inf),
        torch.empty(len(tiles) * num_heads, num_sums),
    )


def _vector_numbers() -> int:
    """The fp32 numbers of a vector of PyTorch's kernels on this CPU."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _number(value: float) -> Tensor:
    # A number would be made a tensor in each call.
    return torch.tensor(value, dtype=torch.float32, device="cpu")


_ONE, _TWO, _HALF = _number(1.0), _number(2.0), _number(0.5)
_LOG2_E, _LN_2, _LEAST = 1.442695, 0.6931472, -87.33655
_FIFTH_FACTOR = 0.00828929059
_FACTORS = *map(_number, (0.0418978221, 0.166676521, 0.499991506, 0.999999701)), _ONE
_BITS_OF_FRACTION = float(2**23)
_LEAST_POWER = _number(126 * _BITS_OF_FRACTION)


def exponential_(x: Tensor) -> Tensor:
    """e^x of fp32 numbers up to zero, with the bits that PyTorch's attention kernel computes; spoils x.

    e^x = 2^n e^r with |r| <= ln(2) / 2, and e^r by a polynomial in Horner's form. `add` with a factor and `addcmul`
    round once, as the kernel's fused operations do. Source: PyTorch 2.13, `Vectorized<float>::exp_u20`.
    """
    x.clamp_min_(_LEAST)
    n = torch.add(_HALF, x, alpha=_LOG2_E).floor_()
    r = x.sub_(n, alpha=_LN_2)
    y = torch.add(_FACTORS[0], r, alpha=_FIFTH_FACTOR)
    for factor in _FACTORS[1:]:
        y = torch.addcmul(factor, r, y)
    # 2^(n - 1) by its bits, and then twice that: 2^n may be too small for a number.
    power = torch.add(_LEAST_POWER, n, alpha=_BITS_OF_FRACTION).to(torch.int32).view(torch.float32)
    return y.mul_(power).mul_(_TWO)
