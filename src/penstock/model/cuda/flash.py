"""Attention by PyTorch's flash kernels in 16 bit: one call for sequences, or rows of a cache, of any lengths.

They are called by name, because every supported release has them with windows and grouped heads, and because
`scaled_dot_product_attention` may choose cuDNN, which spends half a second on each new shape.

Shapes: T tokens of the microbatch or batch, S items of a batch, X tokens of all rows of a cache, H query heads, G key
and value heads, K width of a head.

Source: Dao 2023 (FlashAttention-2).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.attention.kernels import AttentionKernel
from penstock.model.kv_cache import CacheSize, KVCache, Rows, SlotRows, spare_position
from penstock.model.linear import with_gradient
from penstock.model.sequences import Sequences

_WIDEST = 256
_VECTOR = 8
"""Widths of heads are multiples of this number, up to the widest."""


class FlashAttention(AttentionKernel):
    """PyTorch's flash attention in 16 bit, and its attention on any device in other dtypes."""

    def takes(self, dtype: torch.dtype) -> bool:
        """True if the kernels compute in this dtype, with heads of this width."""
        is_wide = self.head_dim % _VECTOR == 0 and self.head_dim <= _WIDEST
        return is_wide and dtype in (torch.float16, torch.bfloat16)

    @property
    def seen(self) -> dict[str, int]:
        """The tokens before and after its own that a query sees, as the kernels are told; all before it by default."""
        return {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}

    def packed(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, sequences: Sequences) -> Tensor:
        if not self.takes(dtype := v_TGK.dtype):
            return super().packed(q_THK, k_TGK, v_TGK, sequences)
        starts, longest = (sequences.cu_seqlens,) * 2, (sequences.max_length,) * 2

        def forward(*qkv: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            out_THK, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
                *qkv, *starts, *longest, 0.0, True, False, **self.seen
            )
            return out_THK, (*qkv, out_THK, lse_HT)

        def backward(grad_THK: Tensor, *kept: Tensor) -> Any:
            no_dropout = torch.empty(0, dtype=torch.uint64, device=grad_THK.device)
            return torch.ops.aten._flash_attention_backward(
                grad_THK, *kept, *starts, *longest, 0.0, True, no_dropout, no_dropout, **self.seen
            )

        # Under autocast a norm of queries and keys gives fp32.
        return with_gradient(forward, backward, q_THK.to(dtype), k_TGK.to(dtype), v_TGK)

    def new_cache(self, size: CacheSize) -> KVCache:
        # ROCm's kernels take no numbers of keys.
        if not self.takes(size.dtype) or torch.version.hip:
            return super().new_cache(size)
        return FlashCache(size, self.num_kv_heads, self.head_dim)

    def cached(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cache: KVCache, rows: Rows) -> Tensor:
        if not isinstance(cache, FlashCache):
            return super().cached(q_THK, k_TGK, v_TGK, cache, rows)
        reads = rows.shared(("reads", cache.num_tokens), lambda: CacheReads.of(rows, cache.num_tokens))
        out_THK, *_ = torch.ops.aten._flash_attention_forward(
            q_THK.to(cache.keys.dtype),
            *cache.rows_in_one(),
            reads.query_starts,
            reads.key_starts,
            *reads.longest,
            0.0,
            True,
            False,
            seqused_k=reads.num_keys,
            **self.seen,
        )
        return out_THK.to(q_THK.dtype)


class FlashCache(KVCache):
    """A cache in which tokens lie before heads, as the kernels read them; its keys and values are views of that."""

    #: of each row
    num_tokens: int
    reads_by_length = True

    def __init__(self, size: CacheSize, num_heads: int, head_dim: int) -> None:
        super().__init__(size, num_heads, head_dim, _tokens_first)
        self.num_tokens = size.num_tokens

    def rows_in_one(self) -> tuple[Tensor, Tensor]:
        """Keys and values [X, G, K] of all rows, one behind the other."""
        keys_XGK, values_XGK = (x.transpose(1, 2).flatten(0, 1) for x in (self.keys, self.values_RGLK))
        return keys_XGK, values_XGK


def _tokens_first(shape: tuple[int, int, int, int], **options: Any) -> Tensor:
    num_rows, num_heads, num_tokens, head_dim = shape
    return torch.zeros((num_rows, num_tokens, num_heads, head_dim), **options).transpose(1, 2)


@dataclass(frozen=True)
class CacheReads:
    """The queries of each item of a batch, and the keys that they read; each row is read from its beginning on."""

    #: [S + 1] int32, each item's first query, and the end of the last
    query_starts: Tensor
    #: [S + 1] int32, the beginning of each item's row among the tokens of all rows; the last number is not read
    key_starts: Tensor
    #: [S] int32
    num_keys: Tensor
    #: the most queries of an item, and as many keys as any reads, or more
    longest: tuple[int, int]

    @classmethod
    def of(cls, rows: Rows, num_tokens: int) -> "CacheReads":
        """The reads of a batch from a cache with rows of so many tokens."""
        if isinstance(rows, SlotRows):
            return cls._of_slot(rows, num_tokens)
        firsts_I, rows_I, ends_I = rows.items_3I.to(torch.int32)
        query_starts, key_starts = F.pad(firsts_I, (0, 1), value=rows.num_tokens), F.pad(rows_I * num_tokens, (0, 1))
        longest = max(item.length for item in rows.items), max(item.end for item in rows.items)
        return cls(query_starts, key_starts, ends_I, longest)

    @classmethod
    def _of_slot(cls, rows: SlotRows, num_tokens: int) -> "CacheReads":
        row_X = torch.arange(rows.num_tokens + 1, dtype=torch.int32, device=rows.positions.device)
        # A dead row reads one key, so that its numbers are finite.
        num_keys = (rows.positions + 1).masked_fill(rows.positions == spare_position(num_tokens), 1)
        return cls(row_X, (row_X + rows.first) * num_tokens, num_keys.to(torch.int32), (1, rows.num_seen))
