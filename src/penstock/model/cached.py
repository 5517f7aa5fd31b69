"""Reading sequences piece by piece: the cache of keys and values, and attention over it.

Where the bits allow it (fp32 on a CPU), a sequence's numbers do not depend on what else is read beside it: each piece
attends over exactly the tokens before it. Rows that read one token each attend in one call where they are neighbours
and equally long, as the samples of one prompt are.

Shapes: T tokens of all pieces, R rows of the cache, L tokens of a row, H query heads, G key and value heads, K width
of a head, D hidden size, S tokens whose logits are wanted.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.schedule import NO_ROW, Piece

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Rows of a cache, tokens of each, and how its values are kept."""

    num_rows: int
    num_tokens: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Keys and values of one attention layer, allocated once; a row is one sequence's, and is overwritten by the next.

    Heads come before tokens, so that what one head reads lies together; `by_token` shows it the other way round.
    """

    def __init__(self, size: CacheSize, num_heads: int, head_dim: int) -> None:
        shape = (size.num_rows, num_heads, size.num_tokens, head_dim)
        self.keys_RGLK, self.values_RGLK = (torch.zeros(shape, dtype=size.dtype, device=size.device) for _ in "kv")

    @property
    def num_bytes(self) -> int:
        return self.keys_RGLK.nbytes + self.values_RGLK.nbytes

    def by_token(self) -> tuple[Tensor, Tensor]:
        """Views of keys and values as [R, L, G, K]."""
        return self.keys_RGLK.transpose(1, 2), self.values_RGLK.transpose(1, 2)

    def write(self, k_TGK: Tensor, v_TGK: Tensor, rows: "CachedRows") -> None:
        """Put every token's key and value at its row and position."""
        self.keys_RGLK[rows.rows_T, :, rows.positions] = k_TGK.to(self.keys_RGLK.dtype)
        self.values_RGLK[rows.rows_T, :, rows.positions] = v_TGK.to(self.values_RGLK.dtype)

    def copy(self, rows: "CachedRows") -> None:
        """Give rows the beginning of their prompt from the row that has read it."""
        for piece in rows.pieces:
            if piece.source != NO_ROW and piece.start:
                for store_RGLK in (self.keys_RGLK, self.values_RGLK):
                    store_RGLK[piece.row, :, : piece.start] = store_RGLK[piece.source, :, : piece.start]


@dataclass(frozen=True, eq=False)
class CachedRows:
    """Where the tokens of a visit belong, which every unit receives beside the residual stream.

    Args:
        pieces: in the order of their tokens; those of one token come first.
        positions: [T] int64, of each token in its sequence.
        rows_T: int64, the cache's row of each token.
        sampled_S: int64, the tokens whose logits are wanted.
    """

    pieces: tuple[Piece, ...]
    positions: Tensor
    rows_T: Tensor
    sampled_S: Tensor
    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device | str = "cpu") -> "CachedRows":
        """The rows that these pieces read."""
        positions, rows, sampled = [], [], []
        for piece in pieces:
            positions += range(piece.start, piece.end)
            rows += [piece.row] * piece.length
            if piece.sampled:
                sampled.append(len(rows) - 1)
        return cls(tuple(pieces), *(torch.tensor(x, dtype=torch.int64).to(device) for x in (positions, rows, sampled)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces together."""
        return len(self.rows_T)

    @property
    def has_copies(self) -> bool:
        """Whether some row is given the beginning of its prompt from another one."""
        return any(piece.source != NO_ROW for piece in self.pieces)

    def sampled(self, x_TD: Tensor) -> Tensor:
        """The tokens [S, D] whose logits are wanted."""
        return x_TD[self.sampled_S]

    def write(self, cache: KVCache, k_TGK: Tensor, v_TGK: Tensor) -> None:
        """Put every token's key and value at its row and position."""
        cache.write(k_TGK, v_TGK, self)

    def attend(self, q_THK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        """Each token's mean [T, H, K] of the values it sees."""
        return cached_attention(q_THK, cache, self, window)

    def shared(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What all layers make alike of this metadata (rotary tables, masks): made once, kept with this object."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


class Reading(Protocol):
    """The tokens of a visit, as the units of a decoder see them: pieces of any lengths, or all rows of a slot."""

    @property
    def positions(self) -> Tensor: ...

    def shared(self, key: Hashable, make: Callable[[], Value]) -> Value: ...

    def sampled(self, x_TD: Tensor) -> Tensor: ...

    def write(self, cache: KVCache, k_TGK: Tensor, v_TGK: Tensor) -> None: ...

    def attend(self, q_THK: Tensor, cache: KVCache, window: int | None) -> Tensor: ...


@runtime_checkable
class CachedUnit(Protocol):
    """A unit that can read piece by piece: what `forward` computes for whole sequences.

    `new_cache` gives what it must remember of tokens that it has read, None if nothing. `decode` is given the residual
    stream [T, D] of the visit's tokens (the first unit token ids [T]), and gives that of the next unit; the last one
    gives logits [S, V], in fp32 or as it computes them, of the sampled tokens alone. One whose `has_fixed_shapes` is
    true does so for `SlotRows` as well, without waiting for the device.
    """

    def new_cache(self, size: CacheSize) -> Any: ...

    def decode(self, x: Tensor, cache: Any, rows: CachedRows) -> Tensor: ...


def cached_attention(q_THK: Tensor, cache: KVCache, rows: CachedRows, window: int | None) -> Tensor:
    """Each token's mean of the values it sees: its own and those before it in its row, `window` with itself at most.

    The tokens' own keys and values are in the cache already. Gives [T, H, K].
    """
    parts, begin = [], 0
    for run in rows.shared("runs", lambda: _runs(rows.pieces)):
        length = sum(piece.length for piece in run)
        q_LHK, begin = q_THK[begin : begin + length], begin + length
        if length == len(run):
            parts.append(_attention_of_rows(q_LHK, cache, run, window))
        else:
            parts.append(_attention_of_piece(q_LHK, cache, run[0], rows, window))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces in order, those of one token together where neighbouring rows are equally long, all others alone."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and last.length == piece.length == 1 and (last.row + 1, last.end) == (piece.row, piece.end):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _first_seen(piece: Piece, window: int | None) -> int:
    return 0 if window is None else max(0, piece.start + 1 - window)


def _attention_of_rows(q_RHK: Tensor, cache: KVCache, run: Sequence[Piece], window: int | None) -> Tensor:
    """[R, H, K] of neighbouring, equally long rows that read one token each; the bits are those of each alone."""
    rows, seen = slice(run[0].row, run[-1].row + 1), slice(_first_seen(run[0], window), run[0].end)
    k_RGLK, v_RGLK = (x[rows, :, seen] for x in (cache.keys_RGLK, cache.values_RGLK))
    # The queries of a group are the rows of one product: nothing is repeated for them.
    q_RGQK = q_RHK.unflatten(1, (k_RGLK.shape[1], -1))
    return F.scaled_dot_product_attention(q_RGQK, k_RGLK, v_RGLK).flatten(1, 2)


def _attention_of_piece(q_LHK: Tensor, cache: KVCache, piece: Piece, rows: CachedRows, window: int | None) -> Tensor:
    first = _first_seen(piece, window)
    k_GLK, v_GLK = (x[piece.row, :, first : piece.end] for x in (cache.keys_RGLK, cache.values_RGLK))
    num_groups, (length, num_heads, _) = len(k_GLK), q_LHK.shape
    mask_LL = None
    if first or piece.start or (window is not None and window < length):
        key = ("cached mask", length, piece.start, window)
        mask_LL = rows.shared(key, lambda: _mask(piece, first, window, q_LHK.device))
    out_HLK = F.scaled_dot_product_attention(
        q_LHK.transpose(0, 1)[None],
        k_GLK[None],
        v_GLK[None],
        mask_LL,
        is_causal=mask_LL is None,
        enable_gqa=num_heads != num_groups,
    )[0]
    return out_HLK.transpose(0, 1)


def _mask(piece: Piece, first: int, window: int | None, device: torch.device) -> Tensor:
    """[tokens of the piece, tokens from `first` on], true where the row's token sees the column's."""
    own = torch.arange(piece.start, piece.end, device=device)[:, None]
    other = torch.arange(first, piece.end, device=device)
    sees = other <= own
    return sees if window is None else sees & (other > own - window)
