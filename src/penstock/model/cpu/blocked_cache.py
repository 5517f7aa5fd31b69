"""A KV cache whose keys lie in blocks, and attention of single tokens over it, for CPUs.

All items of one token attend in one call, whatever their lengths: scores and means are sums of weighted rows alike,
which a CPU computes nearly as fast as it reads them. A row's bits are its own.

Shapes: T tokens of a batch, R rows of the cache, L tokens of a row, S items of one token, H query heads, G key and
value heads, K width of a head, M blocks of a row, B tokens of a block.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from penstock.model.attention.kernels import AttentionKernel, first_seen
from penstock.model.cpu.host_memory import lazy_zeros
from penstock.model.kv_cache import CachedRows, CacheSize, KVCache, Rows

BLOCK_TOKENS = 64
"""Tokens of a block of keys: a row of a block fills a few vectors."""

_MANY_QUERIES = 8
"""Of a key's queries: for so many, attention by blocks and by products takes a CPU equally long (64 to 2,000 keys); but
with several threads a product's bits depend on the number of rows."""


class BlockedAttention(AttentionKernel):
    """PyTorch's attention of texts, and of single tokens all at once where the cache is in blocks."""

    def new_cache(self, size: CacheSize) -> KVCache:
        if self.num_heads // self.num_kv_heads > _MANY_QUERIES and torch.get_num_threads() == 1:
            return KVCache(size, self.num_kv_heads, self.head_dim, lazy_zeros)
        return BlockedCache(size, self.num_kv_heads, self.head_dim)

    def cached(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cache: KVCache, rows: Rows) -> Tensor:
        if isinstance(cache, BlockedCache) and isinstance(rows, CachedRows) and rows.num_single == len(rows.items):
            return self.singles(q_THK, cache, rows)
        return super().cached(q_THK, k_TGK, v_TGK, cache, rows)

    def singles(self, q_SHK: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        if not isinstance(cache, BlockedCache):
            return super().singles(q_SHK, cache, rows)
        key = ("attention at once", self.window, cache.shape, self.num_heads)
        attend = rows.shared(key, lambda: _attention_at_once(rows, self.window, cache, self.num_heads))
        return attend(q_SHK, cache).to(q_SHK.dtype)


class BlockedCache(KVCache):
    """A cache in memory of the host, whose keys [R, G, M, K, B] are transposed in each block."""

    #: of the keys
    shape: tuple[int, ...]
    #: `BlockReads.of` with this cache's shapes; the last ones are kept
    reads: "Callable[[tuple[tuple[int, int, int], ...], int], BlockReads]"

    def __init__(self, size: CacheSize, num_heads: int, head_dim: int) -> None:
        super().__init__(size, num_heads, head_dim, lazy_zeros)
        self.shape = tuple(self.keys.shape)
        self.reads = lru_cache(maxsize=8)(partial(BlockReads.of, self.shape, size.num_tokens))

    def shape_of_keys(self, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
        num_rows, num_heads, num_tokens, head_dim = shape
        return num_rows, num_heads, -(-num_tokens // BLOCK_TOKENS), head_dim, BLOCK_TOKENS

    def keys_of(self, rows: int | slice, tokens: slice) -> Tensor:
        """The keys [..., G, L, K] of these tokens: a view of one block, or a copy."""
        parts = self.key_parts(rows, tokens)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).transpose(-1, -2)

    def key_parts(self, rows: int | slice, tokens: slice) -> list[Tensor]:
        """Views of the keys as [..., G, K, L of the part], block by block."""
        parts, keys, begin = [], self.keys[rows], tokens.start
        while begin < tokens.stop:
            block, first = divmod(begin, BLOCK_TOKENS)
            length = min(BLOCK_TOKENS - first, tokens.stop - begin)
            parts.append(keys[..., block, :, first : first + length])
            begin += length
        return parts

    def put_neighbours(self, rows: slice, token: int, k_RGK: Tensor, v_RGK: Tensor) -> None:
        block, place = divmod(token, BLOCK_TOKENS)
        self.keys[rows, :, block, :, place] = k_RGK
        self.values_RGLK[rows, :, token] = v_RGK

    def put(self, row: int, tokens: slice, k_LGK: Tensor, v_LGK: Tensor) -> None:
        self.values_RGLK[row, :, tokens] = v_LGK.transpose(0, 1)
        parts = self.key_parts(row, tokens)
        for part_GKL, new_GKL in zip(parts, k_LGK.permute(1, 2, 0).split([p.shape[-1] for p in parts], -1)):
            part_GKL.copy_(new_GKL)

    def put_each(self, rows_T: Tensor, positions_T: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        self.values_RGLK[rows_T, :, positions_T] = v_TGK.to(self.values_RGLK.dtype)
        self.keys[rows_T, :, positions_T // BLOCK_TOKENS, :, positions_T % BLOCK_TOKENS] = k_TGK.to(self.keys.dtype)

    def parts(self, row: int, begin: int, end: int) -> list[Tensor]:
        return [*self.key_parts(row, slice(begin, end)), self.values_RGLK[row, :, begin:end]]


@dataclass(frozen=True, eq=False)
class BlockReads:
    """Reads of a cache by blocks, for some parts of rows with one query each: all at once, for all heads, on a CPU.

    A score is a sum of the rows of a block, weighted by the query, and a mean one of values, weighted by softmax. So
    keys and values are read once, with nothing written between. It changes as seldom as a row begins a block.

    Shapes: P parts, X blocks of all parts and heads that are read.
    """

    #: rows of the keys' table [X * K], and the first of each block
    keys: Tensor
    key_starts: Tensor
    #: the part's query of each block, among those of all parts and heads
    queries_X: Tensor
    #: each block's place among as many of all parts [P * H * M]
    places_X: Tensor
    num_places: int
    #: positions in the row, and rows of the values' table
    tokens_XB: Tensor
    values_XB: Tensor

    @classmethod
    def of(
        cls, shape: tuple[int, ...], num_tokens: int, parts: tuple[tuple[int, int, int], ...], num_heads: int
    ) -> "BlockReads":
        """The reads of parts (row, first block, number of blocks) of a cache whose keys have this shape."""
        _, num_groups, num_blocks, width, _ = shape
        dtype = torch.int32 if math.prod(shape) < 2**31 else torch.int64
        row_P111, first_P111, count_P111 = torch.tensor(parts, dtype=dtype)[..., None, None, None].unbind(1)
        group_H11 = torch.arange(num_groups, dtype=dtype).repeat_interleave(num_heads // num_groups)[:, None, None]
        longest = max(count for *_, count in parts)
        block_M1 = torch.arange(longest, dtype=dtype)[:, None]
        shape_PHM = len(parts), num_heads, longest
        places_X = (block_M1 < count_P111).expand(*shape_PHM, 1).flatten().nonzero()[:, 0]

        def read(x_PHMZ: Tensor) -> Tensor:
            return x_PHMZ.expand(*shape_PHM, -1).flatten(0, 2).index_select(0, places_X)

        tokens_PHMB = (first_P111 + block_M1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, dtype=dtype)
        head_PH11 = row_P111 * num_groups + group_H11
        blocks_X1 = read(head_PH11 * num_blocks + first_P111 + block_M1)
        keys = torch.add(torch.arange(width, dtype=dtype), blocks_X1, alpha=width).flatten()
        return cls(
            keys,
            torch.arange(0, len(keys), width, dtype=dtype),
            places_X // longest,
            places_X,
            math.prod(shape_PHM),
            read(tokens_PHMB),
            read(head_PH11 * num_tokens + tokens_PHMB),
        )

    def seen(self, num_heads: int, firsts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tokens that each part sees of its row, from its first to before its end, in all heads.

        Returns the rows of the values' table, the first of each part and head, true where a key [X, B] is seen, and the
        places of those that are.
        """
        dtype = self.tokens_XB.dtype
        first_P, end_P = torch.tensor((firsts, ends), dtype=dtype)[..., None].expand(-1, -1, num_heads).flatten(1)
        sees_XB = self.tokens_XB < end_P.index_select(0, self.queries_X)[:, None]
        if any(first % BLOCK_TOKENS for first in firsts):
            sees_XB &= self.tokens_XB >= first_P.index_select(0, self.queries_X)[:, None]
        places = sees_XB.flatten().nonzero()[:, 0]
        lengths = end_P - first_P
        return self.values_XB.take(places), lengths.cumsum(0, dtype=dtype) - lengths, sees_XB, places


def _attention_at_once(
    rows: CachedRows, window: int | None, like: "BlockedCache", num_heads: int
) -> Callable[[Tensor, "BlockedCache"], Tensor]:
    """Attention [R, H, K] of items of one token each, however long, to a cache by blocks; a row's bits are its own."""
    items, width = rows.items[: rows.num_single], like.values_RGLK.shape[-1]
    firsts = [0 if window is None else first_seen(item, window) for item in items]
    ends = [item.end for item in items]
    begins = [first // BLOCK_TOKENS for first in firsts]
    parts = [(item.row, begin, -(-item.end // BLOCK_TOKENS) - begin) for item, begin in zip(items, begins)]
    reads = like.reads(tuple(parts), num_heads)
    lengths = {end - first for first, end in zip(firsts, ends)}
    # A number would be made a tensor in each call, which takes as long as the product.
    scale = torch.tensor(width**-0.5, dtype=like.keys.dtype)
    # At least a block: fewer numbers than a vector has would be added up in another order.
    if len(lengths) == 1 and min(lengths) >= BLOCK_TOKENS and all(first % BLOCK_TOKENS == 0 for first in firsts):
        (length,) = lengths
        values = reads.values_XB.view(-1, parts[0][2] * BLOCK_TOKENS)[:, :length].flatten()
        value_starts = torch.arange(0, len(values), length, dtype=values.dtype)
        scale_M1 = scale.expand(parts[0][2], 1)

        def attend_whole(q_RHK: Tensor, cache: "BlockedCache") -> Tensor:
            scores_XB = weighted_sums(
                cache.keys, reads.keys, reads.key_starts, q_RHK.to(cache.keys.dtype)[:, :, None] * scale_M1
            )
            weights = scores_XB.view(len(items) * num_heads, -1)[:, :length].softmax(-1)
            return weighted_sums(cache.values_RGLK, values, value_starts, weights).view(q_RHK.shape)

        return attend_whole
    values, value_starts, sees_XB, seen = reads.seen(num_heads, firsts, ends)
    hidden_XB = ~sees_XB
    place = torch.arange(BLOCK_TOKENS, dtype=reads.places_X.dtype)
    weighed = torch.add(place, reads.places_X[:, None], alpha=BLOCK_TOKENS).take(seen)
    nothing = torch.full((reads.num_places, BLOCK_TOKENS), -torch.inf, dtype=like.keys.dtype)

    def attend(q_RHK: Tensor, cache: "BlockedCache") -> Tensor:
        queries = (q_RHK.to(cache.keys.dtype) * scale).flatten(0, 1).index_select(0, reads.queries_X)
        scores_XB = weighted_sums(cache.keys, reads.keys, reads.key_starts, queries).masked_fill_(hidden_XB, -torch.inf)
        every = nothing.index_copy(0, reads.places_X, scores_XB).view(len(items) * num_heads, -1)
        weights = every.softmax(-1).take(weighed)
        return weighted_sums(cache.values_RGLK, values, value_starts, weights).view(q_RHK.shape)

    return attend


def weighted_sums(store: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """The sums of rows of a memory's last dimension; each begins at its place in `rows` and ends at the next one's."""
    table = store.view(-1, store.shape[-1])
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights.flatten())[0]
