"""Where microbatches are cut among the ranks that share every sequence, and where outputs are put together again.

Shapes: T tokens of a whole microbatch, R of this rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.data import PackedBatch, part_of
from penstock.model import Logits, Sequences, ShardedLogits, Spread
from penstock.parallel import cut_sequences, gather_uneven


@dataclass(frozen=True, eq=False)
class ContextShares:
    """This rank's share of every microbatch; `group` carries device tensors, None where it holds all of them."""

    group: dist.ProcessGroup | None
    device: torch.device

    def share(self, microbatch: PackedBatch) -> tuple[PackedBatch, Sequences]:
        """This rank's part, all keys alike, and what units must know of it.

        Raises: ValueError when some rank would hold nothing.
        """
        spread = self.spread(microbatch)
        if spread is None:
            return microbatch, Sequences.from_lengths(microbatch.sequence_lengths("tokens"), self.device)
        return part_of(microbatch, spread.pieces[spread.rank]), Sequences.of_spread(spread, self.device)

    def spread(self, microbatch: PackedBatch) -> Spread | None:
        """Who holds which tokens. Raises: ValueError when some rank would hold none."""
        if self.group is None:
            return None
        pieces = cut_sequences(microbatch.sequence_lengths("tokens"), self.group.size())
        return Spread(self.group.rank(), pieces)

    def whole_logits(self, logits: Logits, microbatch: PackedBatch) -> Logits:
        """The logits of the whole microbatch's tokens; where ranks share the vocabulary, they still do."""
        if isinstance(logits, ShardedLogits):
            return replace(logits, own=self.whole(logits.own, microbatch))
        return self.whole(logits, microbatch)

    def whole(self, x: Tensor, microbatch: PackedBatch) -> Tensor:
        """All ranks' rows [R, ...] in the order of the whole microbatch's tokens, [T, ...]; all of them call it."""
        spread = self.spread(microbatch)
        if spread is None:
            return x
        rows = torch.cat(gather_uneven(x, spread.num_tokens, self.group))
        return torch.empty_like(rows).index_copy_(0, _order(spread).to(x.device), rows)


def _order(spread: Spread) -> Tensor:
    """Where each token of rank after rank stands in the whole microbatch, [T]."""
    starts = list(accumulate(spread.lengths[:-1], initial=0))
    return torch.cat(
        [
            torch.arange(start + piece.start, start + piece.stop)
            for of_rank in spread.pieces
            for start, pieces in zip(starts, of_rank, strict=True)
            for piece in pieces
        ]
    )
