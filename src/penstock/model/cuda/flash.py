"""Attention by PyTorch's flash kernels in 16 bit, which take sequences of any lengths in one call.

They are called by name, because every supported release has them with windows and grouped heads, and because
`scaled_dot_product_attention` may choose cuDNN, which spends half a second on each new shape.

Shapes: T tokens of the microbatch, H query heads, G key and value heads, K width of a head.

Source: Dao 2023 (FlashAttention-2).
"""

from typing import Any

import torch
from torch import Tensor

from penstock.model.attention.kernels import AttentionKernel
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
        if not self.takes(q_THK.dtype):
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

        return with_gradient(forward, backward, q_THK, k_TGK, v_TGK)
