"""Attention of one layer's heads: over whole packed sequences, and over the rows of a KV cache.

Packed sequences of unequal lengths need no padding: runs of adjacent sequences of equal length are one call of
`scaled_dot_product_attention`, which usually is the whole microbatch. Results depend on the microbatch alone.

Over a cache each item attends over exactly the tokens before it, so that where the kernels allow it (fp32 on a CPU) its
numbers do not depend on the rest of its batch. Items of one token attend in one call where their rows are neighbours
and equally long, such as the samples of one prompt.

Shapes: T tokens of the microbatch or batch, N sequences of a run, L tokens of each of them or of an item, R rows of the
cache, S items of one token, H query heads, G key and value heads, K width of a head.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.kv_cache import CachedRows, CacheSize, KVCache, Rows, SlotRows
from penstock.model.sequences import Sequences, SharedByLayers
from penstock.schedule import BatchItem


def attention_of_run(
    q: Tensor, k: Tensor, v: Tensor, run: tuple[int, int], window: int | None, sequences: SharedByLayers
) -> Tensor:
    """Attention of adjacent sequences of one length, `run` being (length, number); [N * L, H, K] in and out."""
    length, count = run
    q_NHLK, k_NHLK, v_NHLK = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
    mask_LL = None
    if window is not None and window < length:
        # True where the row's token sees the column's token.
        mask_LL = sequences.shared(
            ("window", length, window),
            lambda: torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window),
        )
    out_NHLK = F.scaled_dot_product_attention(
        q_NHLK, k_NHLK, v_NHLK, mask_LL, is_causal=mask_LL is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out_NHLK.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class AttentionKernel:
    """Attention as PyTorch computes it on any device; a subclass computes it in another way.

    It is chosen once, where a module is made; `penstock.model.devices` has the choice.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: the tokens that each query sees, its own included; None for all before it
    window: int | None = None

    #: attention of adjacent sequences of one length
    run = staticmethod(attention_of_run)

    def packed(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sequences: Sequences) -> Tensor:
        """Causal attention [T, H, K] within each sequence, over the last `window` tokens of each token, or all.

        Keys and values may have fewer heads than queries (grouped queries: H is a multiple of G).
        """
        runs = [(length, len(list(same))) for length, same in groupby(sequences.lengths)]
        if len(runs) == 1:
            return self.run(q_THK, k_TGK, v_TGK, runs[0], self.window, sequences)
        # split, not slices: its gradient is one concatenation, while that of a slice is a zero tensor of full size.
        sizes = [length * count for length, count in runs]
        parts = zip(runs, q_THK.split(sizes), k_TGK.split(sizes), v_TGK.split(sizes), strict=True)
        return torch.cat([self.run(q, k, v, run, self.window, sequences) for run, q, k, v in parts])

    def new_cache(self, size: CacheSize) -> KVCache:
        """A layer's keys and values, in the order in which `cached` reads them."""
        return KVCache(size, self.num_kv_heads, self.head_dim)

    def cached(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cache: KVCache, rows: Rows) -> Tensor:
        """Attention [T, H, K] of each token over its row up to itself; keys and values are in the cache already."""
        if isinstance(rows, SlotRows):
            return self.slot(q_THK, cache, rows)
        begin = rows.num_single
        if begin == len(rows.items):
            return self.singles(q_THK, cache, rows)
        parts = [self.singles(q_THK[:begin], cache, rows)] if begin else []
        # The only head of a text alone is computed by all threads, and would get other bits among others.
        is_alone = q_THK.shape[1] == 1
        for (start, length, _), same in groupby(
            rows.items[begin:], lambda item: (item.start, item.length, is_alone and item.row)
        ):
            items = list(same)
            end = begin + length * len(items)
            if start == 0:
                # What these texts see is at hand, in the order in which it is read fastest.
                q, k, v = (x[begin:end] for x in (q_THK, k_TGK, v_TGK))
                parts.append(self.run(q, k, v, (length, len(items)), self.window, rows))
            else:
                each = zip(items, q_THK[begin:end].split(length), strict=True)
                parts += [self.item(q_LHK, cache, item, rows) for item, q_LHK in each]
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def singles(self, q_SHK: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        """Attention [S, H, K] of the batch's items of one token."""
        runs = [run for run in rows.runs if run[0].length == 1]
        of_runs = zip(runs, q_SHK.split([len(run) for run in runs]), strict=True)
        means = [
            # The bits of neighbouring, equally long rows are those of each alone.
            _attention_of_queries(
                q_RHK,
                cache,
                slice(run[0].row, run[-1].row + 1),
                slice(first_seen(run[0], self.window), run[0].end),
            )
            for run, q_RHK in of_runs
        ]
        return torch.cat(means) if len(means) > 1 else means[0]

    def slot(self, q_RHK: Tensor, cache: KVCache, rows: SlotRows) -> Tensor:
        """Attention [R, H, K] of all rows of a slot, each up to its position."""
        mask_R11N = rows.shared(("mask", self.window), lambda: _mask_of_slot(rows, self.window))
        slot = slice(rows.first, rows.first + rows.num_tokens)
        return _attention_of_queries(q_RHK, cache, slot, slice(0, rows.num_seen), mask_R11N)

    def item(self, q_LHK: Tensor, cache: KVCache, item: BatchItem, rows: CachedRows) -> Tensor:
        """Attention [L, H, K] of a text that goes on after what is in the cache."""
        first = first_seen(item, self.window)
        k_GLK, v_GLK = cache.keys_of(item.row, slice(first, item.end)), cache.values_RGLK[item.row, :, first : item.end]
        key = ("cached mask", item.length, item.start, self.window)
        mask_LL = rows.shared(key, lambda: _mask_of_item(item, first, self.window, q_LHK.device))
        q, k, v = (x[None] for x in (q_LHK.transpose(0, 1).to(k_GLK.dtype), k_GLK, v_GLK))
        is_grouped = len(k_GLK) != q_LHK.shape[1]
        out_HLK = F.scaled_dot_product_attention(q, k, v, mask_LL, enable_gqa=is_grouped)[0]
        return out_HLK.transpose(0, 1).to(q_LHK.dtype)


# ---- over the KV cache


def first_seen(item: BatchItem, window: int | None) -> int:
    """The first position in its row that the item's first token sees."""
    return 0 if window is None else max(0, item.start + 1 - window)


def _attention_of_queries(
    q_RHK: Tensor, cache: KVCache, rows: slice, seen: slice, mask_R11N: Tensor | None = None
) -> Tensor:
    k_RGNK, v_RGNK = cache.keys_of(rows, seen), cache.values_RGLK[rows, :, seen]
    # The queries of a group are the rows of one product: nothing is repeated for them.
    q_RGQK = q_RHK.unflatten(1, (k_RGNK.shape[1], -1)).to(k_RGNK.dtype)
    return F.scaled_dot_product_attention(q_RGQK, k_RGNK, v_RGNK, mask_R11N).flatten(1, 2).to(q_RHK.dtype)


def _mask_of_slot(rows: SlotRows, window: int | None) -> Tensor:
    position_R1, token_N = rows.positions[:, None], torch.arange(rows.num_seen, device=rows.positions.device)
    sees_RN = token_N <= position_R1
    if window is not None:
        # A dead row may see nothing; one key keeps its numbers finite.
        sees_RN = sees_RN & ((token_N > position_R1 - window) | (position_R1 >= rows.num_seen))
    return sees_RN[:, None, None]


def _mask_of_item(item: BatchItem, first: int, window: int | None, device: torch.device) -> Tensor:
    """[tokens of the item, tokens from `first` on], true where the row's token sees the column's."""
    position_L1 = torch.arange(item.start, item.end, device=device)[:, None]
    token_N = torch.arange(first, item.end, device=device)
    sees_LN = token_N <= position_L1
    return sees_LN if window is None else sees_LN & (token_N > position_L1 - window)
