"""The KV cache, and which of its rows a batch reads and writes, for sequences that are read chunk by chunk.

Shapes: T tokens of a batch, R rows of the cache or of a slot, L tokens of a row, G key and value heads, K width of a
head, D hidden size, S tokens whose logits are wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.model.sequences import SharedByLayers
from penstock.schedule import NO_ROW, BatchItem

_FEW_RUNS = 4
"""Up to so many runs their keys are copied one by one, in a fifth of the time of one write by indices each."""


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

    Heads come before tokens, so that what one head reads is contiguous. A subclass keeps keys in another order.

    Args:
        size: rows, tokens, dtype and device.
        num_heads: groups of heads that share keys.
        head_dim: width of a head.
        zeros: makes a tensor of this shape, dtype and device.
    """

    #: by row, group of heads, token and width of a head [R, G, L, K]
    keys: Tensor
    values_RGLK: Tensor
    #: True if of each row as much is read as it is long, however long others are
    reads_by_length = False

    def __init__(
        self, size: CacheSize, num_heads: int, head_dim: int, zeros: Callable[..., Tensor] = torch.zeros
    ) -> None:
        shape = (size.num_rows, num_heads, size.num_tokens, head_dim)
        self.values_RGLK = zeros(shape, dtype=size.dtype, device=size.device)
        self.keys = zeros(self.shape_of_keys(shape), dtype=size.dtype, device=size.device)

    def shape_of_keys(self, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
        """The shape of all keys, from [R, G, L, K]."""
        return shape

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values_RGLK.nbytes

    def keys_of(self, rows: int | slice, tokens: slice) -> Tensor:
        """The keys [..., G, L, K] of these tokens of a row or of rows."""
        return self.keys[rows][..., tokens, :]

    def put_neighbours(self, rows: slice, token: int, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Write the same token of neighbouring rows."""
        self.keys[rows, :, token] = k_RGK
        self.values_RGLK[rows, :, token] = v_RGK

    def put(self, row: int, tokens: slice, k_LGK: Tensor, v_LGK: Tensor) -> None:
        """Write consecutive tokens of one row."""
        self.keys[row, :, tokens] = k_LGK.transpose(0, 1)
        self.values_RGLK[row, :, tokens] = v_LGK.transpose(0, 1)

    def put_each(self, rows_T: Tensor, positions_T: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Write every token at its row and position."""
        self.keys[rows_T, :, positions_T] = k_TGK.to(self.keys.dtype)
        self.values_RGLK[rows_T, :, positions_T] = v_TGK.to(self.values_RGLK.dtype)

    def copy(self, rows: "CachedRows") -> None:
        """Copy the beginnings of prompts into rows that need them, and put zeros for numbers that are not finite.

        A product with a mask would make these NaN, though no token sees them.
        """
        for item in rows.items:
            if item.source != NO_ROW and item.start:
                for part, source in zip(self.parts(item.row, 0, item.start), self.parts(item.source, 0, item.start)):
                    part.copy_(source)
        # Now that nothing is copied from these rows any more.
        for item in rows.items:
            if item.cleaned:
                last = self.values_RGLK.shape[2] - 1
                # The last one too, to which a row that is not live writes.
                for begin, end in ((item.start, item.cleaned), (last, last + 1)):
                    for part in self.parts(item.row, begin, end):
                        part[~part.isfinite()] = 0

    def parts(self, row: int, begin: int, end: int) -> list[Tensor]:
        """Views of the keys and of the values of these tokens."""
        return [self.keys[row, :, begin:end], self.values_RGLK[row, :, begin:end]]


@dataclass(frozen=True, eq=False)
class CachedRows(SharedByLayers):
    """The rows and positions of a batch's tokens, which every unit receives beside the residual stream.

    Args:
        items: in the order of their tokens; those of one token come first.
        positions: [T] int64, of each token in its sequence.
        rows_T: int64, the cache's row of each token.
        sampled_S: int64, the tokens whose logits are wanted.
        items_3I: int64, of each item its first token in the batch, its row, and the tokens in that row afterwards.
    """

    items: tuple[BatchItem, ...]
    positions: Tensor
    rows_T: Tensor
    sampled_S: Tensor
    items_3I: Tensor
    #: true if any row copies the beginning of its prompt from another one, or is cleaned
    has_copies: bool
    #: the items of one token
    num_single: int

    @classmethod
    def of(cls, items: Sequence[BatchItem], device: torch.device | str = "cpu") -> "CachedRows":
        """The rows that these items read."""
        positions, rows, sampled, firsts, has_copies, num_single = [], [], [], [], False, 0
        for item in items:
            firsts.append(len(rows))
            num_single += item.length == 1
            has_copies = has_copies or item.source != NO_ROW or item.cleaned > 0
            positions += range(item.start, item.start + item.length)
            rows += [item.row] * item.length
            if item.sampled:
                sampled.append(len(rows) - 1)
        # One tensor, because each copy to a device takes its time.
        firsts += [item.row for item in items] + [item.end for item in items]
        numbers = torch.tensor(positions + rows + sampled + firsts, dtype=torch.int64).to(device, non_blocking=True)
        positions_T, rows_T, sampled_S, items_3I = numbers.split(list(map(len, (positions, rows, sampled, firsts))))
        return cls(tuple(items), positions_T, rows_T, sampled_S, items_3I.view(3, -1), has_copies, num_single)

    def behind(self, num: int) -> "CachedRows":
        """The rows behind the first so many items of one sampled token each, once all copies are made."""
        items_3I = self.items_3I[:, num:].clone()
        items_3I[0] -= num
        return CachedRows(
            self.items[num:],
            self.positions[num:],
            self.rows_T[num:],
            self.sampled_S[num:] - num,
            items_3I,
            has_copies=False,
            num_single=self.num_single - num,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all items together."""
        return len(self.rows_T)

    @property
    def num_sampled(self) -> int:
        """The tokens whose logits are wanted."""
        return len(self.sampled_S)

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

    num_sampled = num_tokens

    def sampled(self, x_RD: Tensor) -> Tensor:
        """The tokens whose logits are wanted: each row's."""
        return x_RD

    def write(self, cache: KVCache, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Put each row's key and value at its position."""
        rows_R = self.shared("rows", lambda: torch.arange(self.num_tokens, device=self.positions.device) + self.first)
        cache.put_each(rows_R, self.positions, k_RGK, v_RGK)


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
