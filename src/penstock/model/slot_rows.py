"""All rows of a slot at once, one token each, in tensors whose shapes never change: what a CUDA graph can be made of.

Which rows live, and how much each has read, is in the values of `positions` alone. A row that does not live computes
too, on whatever there is: what it writes goes where no sequence ever reads, and nobody looks at what comes out.

Shapes: R rows of the slot, N tokens of a row that are looked at, L tokens of the cache's rows, H query heads, G key and
value heads, K width of a head.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.cached import KVCache

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class SlotRows:
    """Where the tokens of such a visit belong, which every unit receives in the place of `CachedRows`.

    Made anew for each computation that is run, or captured, for what it shares between layers belongs to that one.

    Args:
        first: the slot's first row in the cache.
        num_seen: tokens from a row's beginning on that are looked at, at least one more than any position that counts.
        positions: [R] int64, of each row's token; of a row that does not live `spare_position`.
    """

    first: int
    num_seen: int
    positions: Tensor
    _shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together, those of rows that do not live included."""
        return len(self.positions)

    def shared(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What all layers make alike of this metadata: made once."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def sampled(self, x_RD: Tensor) -> Tensor:
        """The tokens whose logits are wanted: each row's."""
        return x_RD

    def write(self, cache: KVCache, k_RGK: Tensor, v_RGK: Tensor) -> None:
        """Put each row's key and value at its position."""
        index_RG1K = self.positions[:, None, None, None].expand(-1, *k_RGK.shape[1:2], 1, k_RGK.shape[2])
        for store_RGLK, new_RGK in ((cache.keys_RGLK, k_RGK), (cache.values_RGLK, v_RGK)):
            self._own(store_RGLK).scatter_(2, index_RG1K, new_RGK[:, :, None].to(store_RGLK.dtype))

    def attend(self, q_RHK: Tensor, cache: KVCache, window: int | None) -> Tensor:
        """Each row's mean [R, H, K] of the values up to its position, the last `window` of them at most."""
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
            # Of a row that does not live nothing may be left; one key keeps its numbers finite.
            sees_RN = sees_RN & ((other_N > own_R1 - window) | (own_R1 >= self.num_seen))
        return sees_RN[:, None, None]


def spare_position(num_tokens: int) -> int:
    """Where rows that do not live write, in a cache of so many tokens: the token drawn last is never read again."""
    return num_tokens - 1
