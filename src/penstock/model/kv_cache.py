"""The KV cache, and attention over it for sequences that are read chunk by chunk.

Where the kernels allow it (fp32 on a CPU), a sequence's numbers do not depend on the rest of its batch: each item
attends over exactly the tokens before it. Items of one token attend in one call if their rows are neighbours and
equally long, such as the samples of one prompt.

Shapes: T tokens of a batch, R rows of the cache or of a slot, L tokens of a row, N tokens of a row that are read, H
query heads, G key and value heads, K width of a head, D hidden size, S tokens whose logits are wanted.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.sequences import SharedByLayers
from penstock.schedule import NO_ROW, BatchItem

# ---- Attention of a single token to the keys and values of its sequence, as each step of generation needs it


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


# ---- The KV cache, and attention over it for sequences that are read chunk by chunk


_FEW_RUNS = 4
"""Up to so many runs their keys are copied one by one, in a fifth of the time of one write by indices each."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The number of rows of a cache, the tokens of each, and the dtype and device of its values."""

    num_rows: int
    num_tokens: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Keys and values of one attention layer, allocated once; each row holds one sequence at a time.

    Heads come before tokens, so that what one head reads is contiguous; `by_token` swaps them.
    """

    #: keys and values: row, group of heads, token, width of a head
    keys_RGLK: Tensor
    values_RGLK: Tensor

    def __init__(self, size: CacheSize, num_heads: int, head_dim: int) -> None:
        shape = (size.num_rows, num_heads, size.num_tokens, head_dim)
        num_bytes = math.prod(shape) * size.dtype.itemsize
        if size.device.type != "cpu" or not num_bytes:
            self.keys_RGLK, self.values_RGLK = (torch.zeros(shape, dtype=size.dtype, device=size.device) for _ in "kv")
            return
        # The system gives these zeros memory page by page, so that rows take what they are long.
        memories = (mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY) for _ in "kv")
        self.keys_RGLK, self.values_RGLK = (torch.frombuffer(own, dtype=size.dtype).view(shape) for own in memories)

    @property
    def num_bytes(self) -> int:
        return self.keys_RGLK.nbytes + self.values_RGLK.nbytes

    def by_token(self) -> tuple[Tensor, Tensor]:
        """Views of keys and values as [R, L, G, K]."""
        return self.keys_RGLK.transpose(1, 2), self.values_RGLK.transpose(1, 2)

    def copy(self, rows: "CachedRows") -> None:
        """Copy the beginnings of prompts into rows that need them, and put zeros for numbers that are not finite.

        A product with a mask would make these NaN, though no token sees them.
        """
        for item in rows.items:
            if item.source != NO_ROW and item.start:
                for store_RGLK in (self.keys_RGLK, self.values_RGLK):
                    store_RGLK[item.row, :, : item.start] = store_RGLK[item.source, :, : item.start]
        # Now that nothing is copied from these rows any more.
        for item in rows.items:
            if item.cleaned:
                for store_GLK in (self.keys_RGLK[item.row], self.values_RGLK[item.row]):
                    # The last one too, to which a row that is not live writes.
                    for part_GLK in (store_GLK[:, item.start : item.cleaned], store_GLK[:, -1:]):
                        part_GLK[~part_GLK.isfinite()] = 0


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

    @classmethod
    def of(cls, items: Sequence[BatchItem], device: torch.device | str = "cpu") -> "CachedRows":
        """The rows that these items read."""
        positions, rows, sampled, has_copies = [], [], [], False
        for item in items:
            has_copies = has_copies or item.source != NO_ROW or item.cleaned > 0
            positions += range(item.start, item.start + item.length)
            rows += [item.row] * item.length
            if item.sampled:
                sampled.append(len(rows) - 1)
        # One tensor, because each copy to a device takes its time.
        numbers = torch.tensor(positions + rows + sampled, dtype=torch.int64).to(device)
        positions_T, rows_T, sampled_S = numbers.split((len(positions), len(rows), len(sampled)))
        return cls(tuple(items), positions_T, rows_T, sampled_S, has_copies)

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
        """The tokens [S, D] whose logits are wanted."""
        return x_TD[self.sampled_S]

    def write(self, cache: KVCache, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Put every token's key and value at its row and position."""
        runs, stores = self.runs, ((cache.keys_RGLK, k_TGK), (cache.values_RGLK, v_TGK))
        if len(runs) > _FEW_RUNS:
            for store_RGLK, new_TGK in stores:
                store_RGLK[self.rows_T, :, self.positions] = new_TGK.to(store_RGLK.dtype)
            return
        begin = 0
        for run in runs:
            first, end = run[0], begin + run[0].length * len(run)
            for store_RGLK, new_TGK in stores:
                if first.length == 1:
                    store_RGLK[first.row : first.row + len(run), :, first.start] = new_TGK[begin:end]
                else:
                    store_RGLK[first.row, :, first.start : first.end] = new_TGK[begin:end].transpose(0, 1)
            begin = end

    def attend(self, q_THK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        """Each token's mean [T, H, K] of the values it sees: its own and those before it, at most `window` in total.

        The tokens' own keys and values must already be in the cache.
        """
        parts, begin = [], 0
        for run in self.runs:
            end = begin + run[0].length * len(run)
            if run[0].length == 1:
                parts.append(_attention_of_rows(q_THK[begin:end], cache, run, window))
            else:
                parts.append(_attention_of_item(q_THK[begin:end], cache, run[0], self, window))
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]


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
        index_RG1K = self.positions[:, None, None, None].expand(-1, *k_RGK.shape[1:2], 1, k_RGK.shape[2])
        for store_RGLK, new_RGK in ((cache.keys_RGLK, k_RGK), (cache.values_RGLK, v_RGK)):
            self._own(store_RGLK).scatter_(2, index_RG1K, new_RGK[:, :, None].to(store_RGLK.dtype))

    def attend(self, q_RHK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        """Each row's mean [R, H, K] of the values up to its position, at most the last `window` of them."""
        mask_R11N = self.shared(("mask", window), lambda: self._mask(window))
        k_RGNK, v_RGNK = (self._own(store)[:, :, : self.num_seen] for store in (cache.keys_RGLK, cache.values_RGLK))
        # The queries of a group are the rows of one product: nothing is repeated for them.
        q_RGQK = q_RHK.unflatten(1, (k_RGNK.shape[1], -1))
        return F.scaled_dot_product_attention(q_RGQK, k_RGNK, v_RGNK, mask_R11N).flatten(1, 2)

    def _own(self, store_RGLK: Tensor) -> Tensor:
        return store_RGLK[self.first : self.first + self.num_tokens]

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


def _attention_of_rows(q_RHK: Tensor, cache: KVCache, run: Sequence[BatchItem], window: int | None) -> Tensor:
    """[R, H, K] of neighbouring, equally long rows that read one token each; the bits are those of each alone."""
    rows, seen = slice(run[0].row, run[-1].row + 1), slice(_first_seen(run[0], window), run[0].end)
    k_RGLK, v_RGLK = cache.keys_RGLK[rows, :, seen], cache.values_RGLK[rows, :, seen]
    # The queries of a group are the rows of one product: nothing is repeated for them.
    q_RGQK = q_RHK.view(len(run), k_RGLK.shape[1], -1, q_RHK.shape[-1])
    return attention_of_one(q_RGQK, k_RGLK, v_RGLK).flatten(1, 2)


def _attention_of_item(q_LHK: Tensor, cache: KVCache, item: BatchItem, rows: CachedRows, window: int | None) -> Tensor:
    first = _first_seen(item, window)
    k_GLK, v_GLK = (x[item.row, :, first : item.end] for x in (cache.keys_RGLK, cache.values_RGLK))
    num_groups, (length, num_heads, _) = len(k_GLK), q_LHK.shape
    q_HLK = q_LHK.transpose(0, 1)
    mask_LL = None
    if first or item.start or (window is not None and window < length):
        key = ("cached mask", length, item.start, window)
        mask_LL = rows.shared(key, lambda: _mask(item, first, window, q_LHK.device))
    q, k, v = (widened(x)[None] for x in (q_HLK, k_GLK, v_GLK))
    is_grouped = num_heads != num_groups
    out_HLK = F.scaled_dot_product_attention(q, k, v, mask_LL, is_causal=mask_LL is None, enable_gqa=is_grouped)[0]
    return out_HLK.transpose(0, 1).to(q_LHK.dtype)


def _mask(item: BatchItem, first: int, window: int | None, device: torch.device) -> Tensor:
    """[tokens of the item, tokens from `first` on], true where the row's token sees the column's."""
    own = torch.arange(item.start, item.end, device=device)[:, None]
    other = torch.arange(first, item.end, device=device)
    sees = other <= own
    return sees if window is None else sees & (other > own - window)
