"""All-to-all context parallelism: ranks that hold parts of every sequence exchange heads for tokens.

For the attention itself each rank holds all tokens of its share of the heads.

Shapes: T tokens of this rank, A tokens of all ranks, n ranks, R = n T rows, H query heads, G key and value heads, h one
rank's share of the heads, K width of a head.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509), section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from penstock.model.attention.kernels import packed_attention
from penstock.model.segments import Compute, Exchange, Segment, State
from penstock.model.sequences import Sequences, Spread
from penstock.parallel.collectives import Collectives, Handle
from penstock.settings import ContextForm


@dataclass(frozen=True)
class HeadShape:
    """The numbers of query and key heads of this rank's layer, and the tokens that each query sees (None: all)."""

    num_heads: int
    num_kv_heads: int
    window: int | None = None


def check_heads(form: ContextForm, num_ranks: int, shape: HeadShape) -> None:
    """Refuse ranks that cannot divide the heads evenly, where heads are exchanged.

    Raises:
        ValueError: naming the numbers of ranks that can.
    """
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    if form is ContextForm.ALL_TO_ALL and (num_heads % num_ranks or num_kv_heads % num_ranks):
        possible = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and num_heads % n == 0]
        raise ValueError(
            f"attention = 'all-to-all' shares {num_heads} query and {num_kv_heads} key heads of a rank among "
            f"cp={num_ranks}; possible are cp = {', '.join(map(str, possible))}, or attention = 'ring'"
        )


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The segments from a state (queries, keys, values, ...) to (means [T, H, K], ...), all of this rank's tokens."""

    collectives: Collectives
    spread: Spread
    sequences: Sequences
    shape: HeadShape

    def segments(self) -> Sequence[Segment]:
        return [
            Compute("pack heads", self._pack),
            Exchange("heads for tokens", self._gather_tokens, self._gather_heads),
            Compute("attention", self._attend),
            Exchange("tokens for heads", self._gather_heads, self._gather_tokens),
            Compute("unpack heads", self._unpack),
        ]

    def _pack(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *others: Tensor) -> State:
        """The heads ordered by the rank that gets them, [R, H/n + 2 G/n, K]."""
        n = self.spread.num_ranks
        heads_TnhK = torch.cat([x.unflatten(1, (n, -1)) for x in (q_THK, k_TGK, v_TGK)], 2)
        return (heads_TnhK.transpose(0, 1).flatten(0, 1), *others)

    def _attend(self, heads_AhK: Tensor, *others: Tensor) -> State:
        """Attention over whole sequences for this rank's share of the heads."""
        num_heads, num_kv_heads = (n // self.spread.num_ranks for n in (self.shape.num_heads, self.shape.num_kv_heads))
        there, back = self.sequences.shared("order of all ranks' tokens", self._orders)
        q, k, v = heads_AhK.index_select(0, there).split([num_heads, num_kv_heads, num_kv_heads], 1)
        device = heads_AhK.device
        whole = self.sequences.shared("whole", lambda: Sequences.from_lengths(self.spread.lengths, device))
        mean_AhK = packed_attention(q, k, v, whole, self.shape.window)
        return (mean_AhK.index_select(0, back), *others)

    def _unpack(self, mean_RhK: Tensor, *others: Tensor) -> State:
        mean_nThK = mean_RhK.unflatten(0, (self.spread.num_ranks, -1))
        return (mean_nThK.transpose(0, 1).flatten(1, 2), *others)

    def _gather_tokens(self, x_RhK: Tensor) -> Handle[Tensor]:
        """Exchange this rank's tokens of all heads [R, h, K] for all tokens of its heads [A, h, K]."""
        counts = self.spread.num_tokens
        return self.collectives.all_to_all(x_RhK, [counts[self.spread.rank]] * len(counts), counts)

    def _gather_heads(self, x_AhK: Tensor) -> Handle[Tensor]:
        """Exchange all tokens of this rank's heads [A, h, K] for its tokens of all heads [R, h, K]."""
        counts = self.spread.num_tokens
        return self.collectives.all_to_all(x_AhK, counts, [counts[self.spread.rank]] * len(counts))

    def _orders(self) -> tuple[Tensor, Tensor]:
        """The permutation from tokens ordered by rank to tokens ordered by sequence, and its inverse."""
        starts = list(accumulate(self.spread.lengths[:-1], initial=0))
        by_rank = chain.from_iterable(
            range(start + run.start, start + run.stop)
            for of_rank in self.spread.pieces
            for start, runs in zip(starts, of_rank, strict=True)
            for run in runs
        )
        back = torch.tensor(list(by_rank), device=self.sequences.positions.device)
        return back.argsort(), back
