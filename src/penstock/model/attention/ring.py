"""Ring attention: each rank keeps its queries, and the keys and values of all ranks travel round the ring.

While a rank attends to one rank's keys and values, the next ones are on their way. Key heads travel once, however many
query heads each of them serves. In backward keys and values go round again, followed by their gradients, to which every
rank adds until they are back at their owner. A rank's own keys are available at any time, so a part of that work is
left to overlap with the return of the last gradients.

Shapes: T tokens of this rank, S tokens of another, N sequences of a run, L rows of each of them, H query heads, G key
and value heads, K width of a head.

Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3; the zig-zag order: Brandon et al. 2023 (arXiv
2311.09431), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from penstock.model.attention.kernels import attend, attend_backward, merge
from penstock.model.attention.tiles import Positions, Sight, Tile, tiles
from penstock.model.lanes import Lane
from penstock.model.segments import Grads, State, Undo
from penstock.model.sequences import Spread
from penstock.parallel.collectives import Collectives, Handle


@dataclass(frozen=True, eq=False)
class RingAttention:
    """A segment from (queries, keys, values, ...) to (means [T, H, K], ...); keys may have fewer heads than queries.

    Every rank of the group runs it at the same point, with its part of the same sequences.
    """

    collectives: Collectives
    spread: Spread
    sight: Sight

    @property
    def name(self) -> str:
        return "ring attention"

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        q_THK, k_TGK, v_TGK, *others = state
        own = kv = torch.stack((k_TGK, v_TGK), 1)
        ring = _RingSteps(self)
        out_THK = torch.zeros_like(q_THK, dtype=_precise(q_THK))
        lse_TH = torch.full(q_THK.shape[:2], -torch.inf, dtype=out_THK.dtype, device=q_THK.device)
        for step in range(ring.num_ranks):
            handle = None
            if step + 1 < ring.num_ranks:
                handle = ring.send_on(kv, step)
                yield
            for rows, keys, tile in ring.meetings(step):
                part, part_lse = attend(rows.of(q_THK), *keys.of_both(kv), tile)
                merge(rows.of(out_THK), rows.of(lse_TH), part, part_lse)
            if handle is not None:
                kv = handle.wait()
        mean_THK = out_THK.to(q_THK.dtype)
        if undo is not None:
            undo.append(_Attended(ring, q_THK, own, mean_THK, lse_TH))
        return (mean_THK, *others)


@dataclass(eq=False)
class _Attended:
    """The state kept for backward: this rank's own tensors, none of those that went round."""

    ring: "_RingSteps"
    q_THK: Tensor
    kv: Tensor
    mean_THK: Tensor
    lse_TH: Tensor

    def backward(self, grads: Grads) -> Lane[Grads]:
        grad_THK, *others = grads
        assert grad_THK is not None, "nothing is left to send back through the ring"
        ring, kv = self.ring, self.kv
        grad_q = torch.zeros_like(self.q_THK, dtype=_precise(self.q_THK))
        grad_own = torch.zeros_like(kv, dtype=grad_q.dtype)
        first, rest = ring.own_parts()
        handle = None
        if ring.num_ranks > 1:
            handle = ring.send_on(kv, 0)
            yield
        self._add(first, kv, grad_THK, grad_q, grad_own)
        returning = None
        for step in range(1, ring.num_ranks):
            assert handle is not None
            kv = handle.wait()
            if step + 1 < ring.num_ranks:
                handle = ring.send_on(kv, step)
                yield
            grad_kv = torch.zeros_like(kv, dtype=grad_q.dtype)
            self._add(ring.meetings(step), kv, grad_THK, grad_q, grad_kv)
            if returning is not None:
                grad_kv += returning.wait()
            returning = ring.send_on(grad_kv, step)
            yield
        self._add(rest, self.kv, grad_THK, grad_q, grad_own)
        if returning is not None:
            grad_own += returning.wait()
        grad_k, grad_v = grad_own.to(self.kv.dtype).unbind(1)
        return (grad_q.to(self.q_THK.dtype), grad_k, grad_v, *others)

    def _add(self, meetings: "list[_Meeting]", kv: Tensor, grad: Tensor, grad_q: Tensor, grad_kv: Tensor) -> None:
        for rows, keys, tile in meetings:
            parts = attend_backward(
                rows.of(grad),
                (rows.of(self.q_THK), *keys.of_both(kv)),
                rows.of(self.mean_THK),
                rows.of(self.lse_TH),
                tile,
            )
            for whole, part in zip((rows.of(grad_q), *keys.of_both(grad_kv)), parts, strict=True):
                whole += part


@dataclass(frozen=True)
class _Rows:
    """Some rows of each sequence of a run."""

    #: the run's first token
    start: int
    #: sequences of the run, and tokens of each
    count: int
    length: int
    rows: slice

    def of(self, x: Tensor) -> Tensor:
        """A view [N, heads, L, ...] of [T, heads, ...]."""
        run = x[self.start : self.start + self.count * self.length].unflatten(0, (self.count, self.length))
        return run[:, self.rows].transpose(1, 2)

    def of_both(self, kv_T2GK: Tensor) -> tuple[Tensor, Tensor]:
        """Views of keys and values, [N, G, L, K] each."""
        k_TGK, v_TGK = kv_T2GK.unbind(1)
        return self.of(k_TGK), self.of(v_TGK)


_Meeting = tuple[_Rows, _Rows, Tile]
"""Rows of queries, rows of keys, and their tile."""


class _RingSteps:
    """The steps of the ring: at step s a rank has the keys of the rank s places before it."""

    def __init__(self, attention: RingAttention) -> None:
        self._collectives, self._sight, self._spread = attention.collectives, attention.sight, attention.spread
        self.num_ranks = self._spread.num_ranks
        self._next, self._before = self.source(-1), self.source(1)
        self._num_tokens = self._spread.num_tokens

    def source(self, step: int) -> int:
        """The rank whose keys are here at a step."""
        return (self._spread.rank - step) % self.num_ranks

    def meetings(self, step: int) -> list[_Meeting]:
        """This rank's queries and the keys that are here at a step, tile by tile for each run of equal sequences."""
        return list(self._tiles(self.source(step), apart=False))

    def own_parts(self) -> tuple[list[_Meeting], list[_Meeting]]:
        """The rank's own queries and keys, in two parts of about equal work."""
        every = list(self._tiles(self._spread.rank, apart=True))
        first = [meeting for meeting in every if meeting[0].rows == meeting[1].rows]
        return first, [meeting for meeting in every if meeting not in first]

    def send_on(self, x: Tensor, step: int) -> Handle[Tensor]:
        """Send this step's tensor to the next rank and receive the next step's from the rank before."""
        num_rows = self._num_tokens[self.source(step + 1)]
        return self._collectives.send_receive(x, self._next, self._before, num_rows)

    def _tiles(self, source: int, apart: bool) -> Iterator[_Meeting]:
        own, theirs = self._spread.pieces[self._spread.rank], self._spread.pieces[source]
        start = their_start = 0
        for (mine, keys), same in groupby(zip(own, theirs, strict=True)):
            count, length, their_length = len(list(same)), _length(mine), _length(keys)
            for tile in tiles(mine, keys, self._sight, apart):
                yield (
                    _Rows(start, count, length, tile.queries),
                    _Rows(their_start, count, their_length, tile.keys),
                    tile,
                )
            start, their_start = start + count * length, their_start + count * their_length


def _length(positions: Positions) -> int:
    return sum(map(len, positions))


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
