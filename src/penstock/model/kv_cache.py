"""The KV cache, and attention over it for sequences that are read chunk by chunk.

Where the kernels allow it (fp32 on a CPU), a sequence's numbers do not depend on the rest of its batch: each item
attends over exactly the tokens before it. On a CPU all items of one token attend in one call, whatever their lengths;
elsewhere those whose rows are neighbours and equally long, such as the samples of one prompt.

Shapes: T tokens of a batch, R rows of the cache or of a slot, L tokens of a row, N tokens of a row that are read, H
query heads, G key and value heads, Q = H / G, K width of a head, D hidden size, S tokens whose logits are wanted, M
blocks of a row, B tokens of a block, W tokens of the longest row that are read.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.attention.kernels import attention_of_run
from penstock.model.sequences import SharedByLayers
from penstock.schedule import NO_ROW, BatchItem

# ---- The KV cache, and attention over it for sequences that are read chunk by chunk


_FEW_RUNS = 4
"""Up to so many runs their keys are copied one by one, in a fifth of the time of one write by indices each."""

BLOCK_TOKENS = 64
"""Tokens of a block of keys: a row of a block fills a few vectors of a CPU."""


def cache_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype in which keys and values like these are kept: on a CPU at least fp32.

    There no kernel reads 16-bit ones as they are; to widen them takes twice as long as to read fp32.
    """
    return torch.promote_types(dtype, torch.float32) if device == "cpu" else dtype


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The number of rows of a cache, the tokens of each, and the dtype and device of its values."""

    num_rows: int
    num_tokens: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Keys and values of one attention layer, allocated once; each row holds one sequence at a time.

    Heads come before tokens, so that what one head reads is contiguous. With `by_blocks` a block's keys are transposed:
    scores and means are then sums of weighted rows alike, which a CPU computes nearly as fast as it reads them.
    """

    #: by row, group of heads, token and width of a head [R, G, L, K]; or by row, group, block, width and token of the
    #: block [R, G, M, K, B]
    keys: Tensor
    #: by row, group of heads, token and width of a head
    values_RGLK: Tensor
    #: true if keys are kept in blocks
    by_blocks: bool
    #: `BlockReads.of` with this cache's shapes; the last ones are kept
    reads: "Callable[[tuple[tuple[int, int, int], ...], int], BlockReads]"

    def __init__(self, size: CacheSize, num_heads: int, head_dim: int, by_blocks: bool = False) -> None:
        shape = (size.num_rows, num_heads, size.num_tokens, head_dim)
        num_blocks = -(-size.num_tokens // BLOCK_TOKENS)
        keys = (*shape[:2], num_blocks, head_dim, BLOCK_TOKENS) if by_blocks else shape
        self.keys, self.values_RGLK, self.by_blocks = _zeros(keys, size), _zeros(shape, size), by_blocks
        self.reads = lru_cache(maxsize=8)(partial(BlockReads.of, keys, size.num_tokens))

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values_RGLK.nbytes

    def keys_of(self, rows: int | slice, tokens: slice) -> Tensor:
        """The keys [..., G, L, K] of these tokens of a row or of rows: a view, or of blocks a copy."""
        parts = self.key_parts(rows, tokens)
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).transpose(-1, -2)

    def key_parts(self, rows: int | slice, tokens: slice) -> list[Tensor]:
        """Views of the same keys as [..., G, K, L of the part], block by block."""
        if not self.by_blocks:
            return [self.keys[rows][..., tokens, :].transpose(-1, -2)]
        parts, own, begin = [], self.keys[rows], tokens.start
        while begin < tokens.stop:
            block, first = divmod(begin, BLOCK_TOKENS)
            length = min(BLOCK_TOKENS - first, tokens.stop - begin)
            parts.append(own[..., block, :, first : first + length])
            begin += length
        return parts

    def put_neighbours(self, rows: slice, token: int, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Write the same token of neighbouring rows."""
        self.values_RGLK[rows, :, token] = v_RGK
        if self.by_blocks:
            block, place = divmod(token, BLOCK_TOKENS)
            self.keys[rows, :, block, :, place] = k_RGK
        else:
            self.keys[rows, :, token] = k_RGK

    def put(self, row: int, tokens: slice, k_LGK: Tensor, v_LGK: Tensor) -> None:
        """Write consecutive tokens of one row."""
        self.values_RGLK[row, :, tokens] = v_LGK.transpose(0, 1)
        parts = self.key_parts(row, tokens)
        for part_GKL, new_GKL in zip(parts, k_LGK.permute(1, 2, 0).split([p.shape[-1] for p in parts], -1)):
            part_GKL.copy_(new_GKL)

    def put_each(self, rows_T: Tensor, positions_T: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Write every token at its row and position."""
        self.values_RGLK[rows_T, :, positions_T] = v_TGK.to(self.values_RGLK.dtype)
        if self.by_blocks:
            self.keys[rows_T, :, positions_T // BLOCK_TOKENS, :, positions_T % BLOCK_TOKENS] = k_TGK.to(self.keys.dtype)
        else:
            self.keys[rows_T, :, positions_T] = k_TGK.to(self.keys.dtype)

    def copy(self, rows: "CachedRows") -> None:
        """Copy the beginnings of prompts into rows that need them, and put zeros for numbers that are not finite.

        A product with a mask would make these NaN, though no token sees them.
        """
        for item in rows.items:
            if item.source != NO_ROW and item.start:
                for own, other in zip(self._parts(item.row, 0, item.start), self._parts(item.source, 0, item.start)):
                    own.copy_(other)
        # Now that nothing is copied from these rows any more.
        for item in rows.items:
            if item.cleaned:
                last = self.values_RGLK.shape[2] - 1
                # The last one too, to which a row that is not live writes.
                for begin, end in ((item.start, item.cleaned), (last, last + 1)):
                    for part in self._parts(item.row, begin, end):
                        part[~part.isfinite()] = 0

    def _parts(self, row: int, begin: int, end: int) -> list[Tensor]:
        """Views of the keys and of the values of these tokens."""
        return [*self.key_parts(row, slice(begin, end)), self.values_RGLK[row, :, begin:end]]


def _zeros(shape: tuple[int, ...], size: CacheSize) -> Tensor:
    num_bytes = math.prod(shape) * size.dtype.itemsize
    if size.device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=size.dtype, device=size.device)
    # The system gives these zeros memory page by page, so that rows take what they are long.
    return torch.frombuffer(mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY), dtype=size.dtype).view(shape)


@dataclass(frozen=True, eq=False)
class CachedRows(SharedByLayers):
    """The rows and positions of a batch's tokens, which every unit receives beside the residual stream.

    Args:
        items: in the order of their tokens; those of one token come first.
        positions: [T] int64, of each token in its sequence.
        rows_T: int64, the cache's row of each token.
        sampled_S: int64, the tokens whose logits are wanted.
    """

    items: tuple[BatchItem, ...]
    positions: Tensor
    rows_T: Tensor
    sampled_S: Tensor
    #: true if any row copies the beginning of its prompt from another one, or is cleaned
    has_copies: bool
    #: the items of one token
    num_single: int

    @classmethod
    def of(cls, items: Sequence[BatchItem], device: torch.device | str = "cpu") -> "CachedRows":
        """The rows that these items read."""
        positions, rows, sampled, has_copies, num_single = [], [], [], False, 0
        for item in items:
            num_single += item.length == 1
            has_copies = has_copies or item.source != NO_ROW or item.cleaned > 0
            positions += range(item.start, item.start + item.length)
            rows += [item.row] * item.length
            if item.sampled:
                sampled.append(len(rows) - 1)
        # One tensor, because each copy to a device takes its time.
        numbers = torch.tensor(positions + rows + sampled, dtype=torch.int64).to(device)
        positions_T, rows_T, sampled_S = numbers.split((len(positions), len(rows), len(sampled)))
        return cls(tuple(items), positions_T, rows_T, sampled_S, has_copies, num_single)

    @property
    def num_tokens(self) -> int:
        """Tokens of all items together."""
        return len(self.rows_T)

    @cached_property
    def runs(self) -> list[list[BatchItem]]:
        """The items in order: those of one token together if neighbouring rows are equally long, all others alone."""
        runs: list[list[BatchItem]] = []
        for item in self.items:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and last.length == item.length == 1
                and (last.row + 1, last.start) == (item.row, item.start)
            ):
                runs[-1].append(item)
            else:
                runs.append([item])
        return runs

    def sampled(self, x_TD: Tensor) -> Tensor:
        """The tokens [S, D] whose logits are wanted, of all tokens or of those alone."""
        return x_TD if len(x_TD) == len(self.sampled_S) else x_TD[self.sampled_S]

    def write(self, cache: KVCache, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Put every token's key and value at its row and position."""
        if len(self.runs) > _FEW_RUNS:
            cache.put_each(self.rows_T, self.positions, k_TGK, v_TGK)
            return
        begin = 0
        for run in self.runs:
            first, num_tokens = run[0], run[0].length * len(run)
            end = begin + num_tokens
            k, v = (k_TGK, v_TGK) if num_tokens == len(k_TGK) else (k_TGK[begin:end], v_TGK[begin:end])
            if first.length == 1:
                cache.put_neighbours(slice(first.row, first.row + len(run)), first.start, k, v)
            else:
                cache.put(first.row, slice(first.start, first.end), k, v)
            begin = end

    def attend(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        """Each token's mean [T, H, K] of the values it sees: its own and those before it, at most `window` in total.

        The tokens' own keys and values must already be in the cache.
        """
        if cache.by_blocks and self.num_single == len(self.items):
            return self._at_once(q_THK, cache, window)
        parts, begin = [], self.num_single
        if cache.by_blocks and begin:
            parts.append(self._at_once(q_THK[:begin], cache, window))
        elif begin:
            parts += self._by_runs(q_THK[:begin], cache, window)
        # The only head of a text alone is computed by all threads, and would get other bits among others.
        is_alone = q_THK.shape[1] == 1
        for (start, length, _), same in groupby(
            self.items[begin:], lambda item: (item.start, item.length, is_alone and item.row)
        ):
            items = list(same)
            end = begin + length * len(items)
            if start == 0:
                # What these texts see is at hand, in the order in which it is read fastest.
                own = slice(begin, end)
                parts.append(attention_of_run(q_THK[own], k_TGK[own], v_TGK[own], (length, len(items)), window, self))
            else:
                for item, q_LHK in zip(items, q_THK[begin:end].split(length), strict=True):
                    parts.append(_attention_of_item(q_LHK, cache, item, self, window))
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _by_runs(self, q_SHK: Tensor, cache: KVCache, window: int | None) -> list[Tensor]:
        runs = [run for run in self.runs if run[0].length == 1]
        of_runs = zip(runs, q_SHK.split([len(run) for run in runs]), strict=True)
        return [_attention_of_rows(q_RHK, cache, run, window) for run, q_RHK in of_runs]

    def _at_once(self, q_THK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        key = ("attention at once", window, cache.keys.shape, q_THK.shape[1])
        single = self.items[: self.num_single]
        attend = self.shared(key, partial(_attention_at_once, single, window, cache, q_THK.shape[1]))
        return attend(q_THK, cache).to(q_THK.dtype)


@dataclass(frozen=True, eq=False)
class SlotRows(SharedByLayers):
    """All rows of a slot, one token each, in tensors whose shapes never change, so that a CUDA graph can capture them.

    Every unit receives it in place of `CachedRows`. Only the values of `positions` determine which rows are live and
    how much each has read. A dead row computes too: it writes where no sequence ever reads, and its output is dropped.

    Each computation that is run or captured has its own, because the values that layers share belong to it.

    Args:
        first: the slot's first row in the cache.
        num_seen: tokens read from a row's beginning on, at least one more than any live position.
        positions: [R] int64, of each row's token; `spare_position` for a dead row.
    """

    first: int
    num_seen: int
    positions: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together, dead ones included."""
        return len(self.positions)

    def sampled(self, x_RD: Tensor) -> Tensor:
        """The tokens whose logits are wanted: each row's."""
        return x_RD

    def write(self, cache: KVCache, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Put each row's key and value at its position."""
        rows_R = self.shared("rows", lambda: torch.arange(self.num_tokens, device=self.positions.device) + self.first)
        cache.put_each(rows_R, self.positions, k_RGK, v_RGK)

    def attend(self, q_RHK: Tensor, k_RGK: Tensor, v_RGK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        """Each row's mean [R, H, K] of the values up to its position, at most the last `window` of them."""
        mask_R11N = self.shared(("mask", window), lambda: self._mask(window))
        own, seen = slice(self.first, self.first + self.num_tokens), slice(0, self.num_seen)
        k_RGNK, v_RGNK = cache.keys_of(own, seen), cache.values_RGLK[own, :, seen]
        # The queries of a group are the rows of one product: nothing is repeated for them.
        q_RGQK = q_RHK.unflatten(1, (k_RGNK.shape[1], -1)).to(k_RGNK.dtype)
        return F.scaled_dot_product_attention(q_RGQK, k_RGNK, v_RGNK, mask_R11N).flatten(1, 2).to(q_RHK.dtype)

    def _mask(self, window: int | None) -> Tensor:
        own_R1, other_N = self.positions[:, None], torch.arange(self.num_seen, device=self.positions.device)
        sees_RN = other_N <= own_R1
        if window is not None:
            # A dead row may see nothing; one key keeps its numbers finite.
            sees_RN = sees_RN & ((other_N > own_R1 - window) | (own_R1 >= self.num_seen))
        return sees_RN[:, None, None]


Rows = CachedRows | SlotRows
"""The tokens of a batch as the units of a decoder see them: items of any lengths, or one token of each row."""


def spare_position(num_tokens: int) -> int:
    """The position that dead rows write to in a cache of `num_tokens`: the token sampled last is never read again."""
    return num_tokens - 1


@runtime_checkable
class CachedUnit(Protocol):
    """A unit that can read sequences chunk by chunk, computing what `forward` computes for whole ones.

    `new_cache` makes the unit's memory of the tokens that it has read, None if it needs none. `decode` takes the
    residual stream [T, D] of the batch's tokens (the first unit: token ids [T]) and returns that of the next unit; the
    last unit returns only the sampled tokens' logits [S, V], in fp32 or as it computes them. A unit whose
    `has_fixed_shapes` is true takes `SlotRows` as well, without waiting for the device.
    """

    def new_cache(self, size: CacheSize) -> Any: ...

    def decode(self, x: Tensor, cache: Any, rows: CachedRows) -> Tensor: ...


def _first_seen(item: BatchItem, window: int | None) -> int:
    return 0 if window is None else max(0, item.start + 1 - window)


@dataclass(frozen=True, eq=False)
class BlockReads(SharedByLayers):
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

    def scores(self, cache: KVCache, queries: Tensor) -> Tensor:
        """Products [X, B] of keys with the query of each block [X, K]."""
        return weighted_sums(cache.keys, self.keys, self.key_starts, queries)

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
    items: Sequence[BatchItem], window: int | None, like: KVCache, num_heads: int
) -> Callable[[Tensor, KVCache], Tensor]:
    """Attention [R, H, K] of items of one token each, however long, to a cache by blocks; a row's bits are its own."""
    width = like.values_RGLK.shape[-1]
    firsts, ends = [_first_seen(item, window) for item in items], [item.end for item in items]
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

        def attend_whole(q_RHK: Tensor, cache: KVCache) -> Tensor:
            scores_XB = reads.scores(cache, q_RHK.to(cache.keys.dtype)[:, :, None] * scale_M1)
            weights = scores_XB.view(len(items) * num_heads, -1)[:, :length].softmax(-1)
            return weighted_sums(cache.values_RGLK, values, value_starts, weights).view(q_RHK.shape)

        return attend_whole
    values, value_starts, sees_XB, seen = reads.seen(num_heads, firsts, ends)
    hidden_XB = ~sees_XB
    place = torch.arange(BLOCK_TOKENS, dtype=reads.places_X.dtype)
    weighed = torch.add(place, reads.places_X[:, None], alpha=BLOCK_TOKENS).take(seen)
    nothing = torch.full((reads.num_places, BLOCK_TOKENS), -torch.inf, dtype=like.keys.dtype)

    def attend(q_RHK: Tensor, cache: KVCache) -> Tensor:
        queries = (q_RHK.to(cache.keys.dtype) * scale).flatten(0, 1).index_select(0, reads.queries_X)
        scores_XB = reads.scores(cache, queries).masked_fill_(hidden_XB, -torch.inf)
        every = nothing.index_copy(0, reads.places_X, scores_XB).view(len(items) * num_heads, -1)
        weights = every.softmax(-1).take(weighed)
        return weighted_sums(cache.values_RGLK, values, value_starts, weights).view(q_RHK.shape)

    return attend


def weighted_sums(store: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """The sums of rows of a memory's last dimension; each begins at its place in `rows` and ends at the next one's."""
    table = store.view(-1, store.shape[-1])
    return torch.embedding_bag(table, rows, starts, False, 0, False, weights.flatten())[0]


def _attention_of_rows(q_RHK: Tensor, cache: KVCache, run: Sequence[BatchItem], window: int | None) -> Tensor:
    """[R, H, K] of neighbouring, equally long rows that read one token each; the bits are those of each alone."""
    rows, seen = slice(run[0].row, run[-1].row + 1), slice(_first_seen(run[0], window), run[0].end)
    k_RGLK, v_RGLK = cache.keys_of(rows, seen), cache.values_RGLK[rows, :, seen]
    # The queries of a group are the rows of one product: nothing is repeated for them.
    q_RGQK = q_RHK.view(len(run), k_RGLK.shape[1], -1, q_RHK.shape[-1]).to(k_RGLK.dtype)
    return F.scaled_dot_product_attention(q_RGQK, k_RGLK, v_RGLK).flatten(1, 2).to(q_RHK.dtype)


def _attention_of_item(q_LHK: Tensor, cache: KVCache, item: BatchItem, rows: CachedRows, window: int | None) -> Tensor:
    """[L, H, K] of a text that goes on after what is in the cache."""
    first = _first_seen(item, window)
    k_GLK, v_GLK = cache.keys_of(item.row, slice(first, item.end)), cache.values_RGLK[item.row, :, first : item.end]
    key = ("cached mask", item.length, item.start, window)
    mask_LL = rows.shared(key, lambda: _mask(item, first, window, q_LHK.device))
    q, k, v = (x[None] for x in (q_LHK.transpose(0, 1).to(k_GLK.dtype), k_GLK, v_GLK))
    is_grouped = len(k_GLK) != q_LHK.shape[1]
    out_HLK = F.scaled_dot_product_attention(q, k, v, mask_LL, enable_gqa=is_grouped)[0]
    return out_HLK.transpose(0, 1).to(q_LHK.dtype)


def _mask(item: BatchItem, first: int, window: int | None, device: torch.device) -> Tensor:
    """[tokens of the item, tokens from `first` on], true where the row's token sees the column's."""
    own = torch.arange(item.start, item.end, device=device)[:, None]
    other = torch.arange(first, item.end, device=device)
    sees = other <= own
    return sees if window is None else sees & (other > own - window)
