"""Attention between the ranks of a context-parallel group, each with parts of every sequence: ring or all-to-all.

In ring attention each rank keeps its queries, and the keys and values of all ranks travel round the ring. While a rank
attends to one rank's keys and values, the next ones are on their way. Key heads travel once, however many query heads
share them. In backward keys and values go round again, followed by their gradients, to which every rank adds until they
are back at their owner. A rank's own keys are always available, so part of that work is left to overlap with the return
of the last gradients.

In the all-to-all form ranks exchange heads for tokens: for the attention itself each rank holds all tokens of its share
of the heads.

Shapes: T tokens of this rank, S tokens of another, A tokens of all ranks, n ranks, R = n T rows, N sequences of a run,
L rows of each of them, H query heads, G key and value heads, h one rank's share of the heads, K width of a head.

Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3, for the ring; Brandon et al. 2023 (arXiv
2311.09431), section 3, for its zig-zag order; Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509), section 3, for
the all-to-all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from penstock.model.attention.kernels import AttentionKernel
from penstock.model.attention.tiles import Positions, Tile, attend, attend_backward, merge_part, tiles
from penstock.model.lanes import Compute, Exchange, Grads, Lane, Segment, State, Undo
from penstock.model.linear import dtype_of_sums
from penstock.model.sequences import Sequences, Spread
from penstock.parallel.collectives import Collectives, Handle
from penstock.settings import ContextForm


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """Attention of a layer's heads on this rank over sequences that the ranks of a context-parallel group share.

    Raises:
        ValueError: heads are exchanged, and the ranks cannot divide them evenly; names the numbers of ranks that can.
    """

    form: ContextForm
    collectives: Collectives
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        num_ranks, num_heads, num_kv_heads = self.collectives.size, self.num_heads, self.num_kv_heads
        if self.form is ContextForm.ALL_TO_ALL and (num_heads % num_ranks or num_kv_heads % num_ranks):
            possible = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and num_heads % n == 0]
            raise ValueError(
                f"attention = 'all-to-all' shares {num_heads} query and {num_kv_heads} key heads of a rank among "
                f"cp={num_ranks}; possible are cp = {', '.join(map(str, possible))}, or attention = 'ring'"
            )

    def segments(self, sequences: Sequences, kernel: AttentionKernel) -> Sequence[Segment]:
        """The segments from a state (queries, keys, values, ...) to (means [T, H, K], ...), all of this rank's tokens.

        kernel: attends over whole sequences, where heads are exchanged, with its window in any form.

        Every rank of the group walks them at the same point, with its part of the same sequences.
        """
        spread = sequences.spread
        assert spread is not None and spread.num_ranks == self.collectives.size, "sequences not spread over this group"
        if self.form is ContextForm.RING:
            return [RingAttention(self.collectives, spread, kernel.window)]
        n, counts, device = spread.num_ranks, spread.num_tokens, sequences.positions.device
        own_counts = [counts[spread.rank]] * n

        def gather_tokens(x_RhK: Tensor) -> Handle[Tensor]:
            """Exchange this rank's tokens of all heads [R, h, K] for all tokens of its heads [A, h, K]."""
            return self.collectives.all_to_all(x_RhK, own_counts, counts)

        def gather_heads(x_AhK: Tensor) -> Handle[Tensor]:
            """Exchange all tokens of this rank's heads [A, h, K] for its tokens of all heads [R, h, K]."""
            return self.collectives.all_to_all(x_AhK, counts, own_counts)

        def pack(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *others: Tensor) -> State:
            """The heads ordered by the rank that gets them, [R, H/n + 2 G/n, K]."""
            heads_TnhK = torch.cat([x.unflatten(1, (n, -1)) for x in (q_THK, k_TGK, v_TGK)], 2)
            return (heads_TnhK.transpose(0, 1).flatten(0, 1), *others)

        def attend(heads_AhK: Tensor, *others: Tensor) -> State:
            """Attention over whole sequences for this rank's share of the heads."""
            by_rank = sequences.shared(
                "order of all ranks' tokens", lambda: torch.cat([spread.rows(rank) for rank in range(n)]).to(device)
            )
            by_sequence = sequences.shared("order of all sequences' tokens", by_rank.argsort)
            num_own = [self.num_heads // n, self.num_kv_heads // n, self.num_kv_heads // n]
            q, k, v = heads_AhK.index_select(0, by_sequence).split(num_own, 1)
            whole = sequences.shared("whole", lambda: Sequences.from_lengths(spread.lengths, device))
            return (kernel.packed(q, k, v, whole).index_select(0, by_rank), *others)

        def unpack(mean_RhK: Tensor, *others: Tensor) -> State:
            return (mean_RhK.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2), *others)

        return [
            Compute("pack heads", pack),
            Exchange("heads for tokens", gather_tokens, gather_heads),
            Compute("attention", attend),
            Exchange("tokens for heads", gather_heads, gather_tokens),
            Compute("unpack heads", unpack),
        ]


@dataclass(frozen=True, eq=False)
class RingAttention:
    """A segment from (queries, keys, values, ...) to (means [T, H, K], ...); keys may have fewer heads than queries.

    Every rank of the group runs it at the same point, with its part of the same sequences.
    """

    collectives: Collectives
    spread: Spread
    window: int | None
    name: str = "ring attention"

    @property
    def num_ranks(self) -> int:
        return self.spread.num_ranks

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        q_THK, k_TGK, v_TGK, *others = state
        own = kv = torch.stack((k_TGK, v_TGK), 1)
        out_THK = torch.zeros_like(q_THK, dtype=dtype_of_sums(q_THK))
        lse_TH = torch.full(q_THK.shape[:2], -torch.inf, dtype=out_THK.dtype, device=q_THK.device)
        for step in range(self.num_ranks):
            handle = None
            if step + 1 < self.num_ranks:
                handle = self.send_on(kv, step)
                yield
            k_SGK, v_SGK = kv.unbind(1)
            for rows, keys, tile in self.meetings(step):
                part, part_lse = attend(rows(q_THK), keys(k_SGK), keys(v_SGK), tile)
                merge_part(rows(out_THK), rows(lse_TH), part, part_lse)
            if handle is not None:
                kv = handle.wait()
        mean_THK = out_THK.to(q_THK.dtype)
        if undo is not None:
            undo.append(partial(self.backward, (q_THK, own, mean_THK, lse_TH)))
        return (mean_THK, *others)

    def backward(self, kept: tuple[Tensor, Tensor, Tensor, Tensor], grads: Grads) -> Lane[Grads]:
        """From the gradients of the means to those of this rank's queries, keys and values.

        `kept` are this rank's own tensors, none of those that went round: queries, keys with values, means, and the
        logarithm of each row's sum of exponentials.
        """
        grad_THK, *others = grads
        assert grad_THK is not None, "nothing is left to send back through the ring"
        q_THK, own, mean_THK, lse_TH = kept
        kv, grad_q = own, torch.zeros_like(q_THK, dtype=dtype_of_sums(q_THK))
        grad_own = torch.zeros_like(kv, dtype=grad_q.dtype)
        of_queries = grad_THK, q_THK, mean_THK, lse_TH, grad_q
        first, rest = self.own_parts()
        handle = None
        if self.num_ranks > 1:
            handle = self.send_on(kv, 0)
            yield
        add_gradients(first, of_queries, kv, grad_own)
        returning = None
        for step in range(1, self.num_ranks):
            assert handle is not None
            kv = handle.wait()
            if step + 1 < self.num_ranks:
                handle = self.send_on(kv, step)
                yield
            grad_kv = torch.zeros_like(kv, dtype=grad_q.dtype)
            add_gradients(self.meetings(step), of_queries, kv, grad_kv)
            if returning is not None:
                grad_kv += returning.wait()
            returning = self.send_on(grad_kv, step)
            yield
        add_gradients(rest, of_queries, own, grad_own)
        if returning is not None:
            grad_own += returning.wait()
        grad_k, grad_v = grad_own.to(own.dtype).unbind(1)
        return (grad_q.to(q_THK.dtype), grad_k, grad_v, *others)

    def source(self, step: int) -> int:
        """The rank whose keys are here at a step: that many places before this one."""
        return (self.spread.rank - step) % self.num_ranks

    def meetings(self, step: int) -> "list[_Meeting]":
        """This rank's queries and the keys that are here at a step, tile by tile for each run of equal sequences."""
        return list(self._tiles(self.source(step), apart=False))

    def own_parts(self) -> "tuple[list[_Meeting], list[_Meeting]]":
        """The rank's own queries and keys, in two parts of about equal work."""
        every = list(self._tiles(self.spread.rank, apart=True))
        first = [meeting for meeting in every if meeting[2].queries == meeting[2].keys]
        return first, [meeting for meeting in every if meeting[2].queries != meeting[2].keys]

    def send_on(self, x: Tensor, step: int) -> Handle[Tensor]:
        """Send this step's tensor to the next rank and receive the next step's from the rank before."""
        num_rows = self.spread.num_tokens[self.source(step + 1)]
        return self.collectives.send_receive(x, self.source(-1), self.source(1), num_rows)

    def _tiles(self, source: int, apart: bool) -> "Iterator[_Meeting]":
        own, theirs = self.spread.pieces[self.spread.rank], self.spread.pieces[source]
        start = their_start = 0
        for (mine, keys), same in groupby(zip(own, theirs, strict=True)):
            count, length, their_length = len(list(same)), _length(mine), _length(keys)
            for tile in tiles(mine, keys, self.window, apart):
                queries = partial(_rows, start, count, length, tile.queries)
                yield queries, partial(_rows, their_start, count, their_length, tile.keys), tile
            start, their_start = start + count * length, their_start + count * their_length


_Meeting = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tile]
"""The rows of queries in a tensor of this rank's tokens, the rows of keys in one of their rank's, and their tile."""


def add_gradients(meetings: Sequence[_Meeting], of_queries: Sequence[Tensor], kv: Tensor, grad_kv: Tensor) -> None:
    """Add what these meetings give to the gradients of keys with values, and of the queries.

    `of_queries`: the gradient of the means, queries, means and log-sum-exps, and the queries' gradient so far.
    """
    k_SGK, v_SGK = kv.unbind(1)
    for rows, keys, tile in meetings:
        grad, q, mean, lse, grad_q = map(rows, of_queries)
        parts = attend_backward(grad, (q, keys(k_SGK), keys(v_SGK)), mean, lse, tile)
        for whole, part in zip((grad_q, *map(keys, grad_kv.unbind(1))), parts, strict=True):
            whole += part


def _rows(start: int, count: int, length: int, rows: slice, x: Tensor) -> Tensor:
    """A view [N, heads, L, ...] of [T, heads, ...]: rows of each sequence of a run, which begins at token `start`."""
    run = x[start : start + count * length].unflatten(0, (count, length))
    return run[:, rows].transpose(1, 2)


def _length(positions: Positions) -> int:
    return sum(map(len, positions))
