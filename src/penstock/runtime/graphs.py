"""Decoding over shapes that never change, and CUDA graphs of it.

A visit of a slot that draws a token for each of its live rows is computed for all its rows, whoever lives in them: what
changes from visit to visit lies in tensors. So where there is CUDA its kernels are captured once, for each slot and
each power of two of tokens to look at, and launched together from then on; weights are read where they are and may
change in place. Prompts are read as elsewhere, and never captured. Without CUDA the same computation runs as it is.

Shapes: T tokens of the live rows, R rows of the slot, D hidden size, V vocabulary.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model import CachedRows, SlotRows, spare_position
from penstock.runtime.stage import Stage
from penstock.schedule import Piece

_FEWEST_SEEN = 64
"""Tokens of the smallest attention that is worth a graph of its own."""


class DecodeForm(enum.Enum):
    """How a slot's rows read one token each.

    LIVE_ROWS: those that live alone. ALL_ROWS: all of the slot's, over shapes that never change. GRAPHS: the same,
    captured where there is CUDA.
    """

    LIVE_ROWS = "live-rows"
    ALL_ROWS = "all-rows"
    GRAPHS = "graphs"


@dataclass(frozen=True)
class _Shape:
    """What one computation is made for: a slot's rows in the cache, and how many of their tokens are looked at."""

    first: int
    num_rows: int
    num_seen: int


class _Fixed:
    """One computation: its inputs stay where they are, and with them, if it is captured, its output.

    x: [R] token ids or [R, D]. positions: [R] int64.
    """

    def __init__(self, decoder: "FixedDecoder", shape: _Shape, like: Tensor) -> None:
        self.decoder, self.shape = decoder, shape
        self.x = like.new_zeros(shape.num_rows, *like.shape[1:])
        self.positions = torch.zeros(shape.num_rows, dtype=torch.int64, device=like.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    def run(self) -> Tensor:
        """The output for what lies in the inputs; a captured one is overwritten by the next run of any graph."""
        if self.decoder.aside is None:
            return self._compute()
        if self.graph is None:
            self._capture(self.decoder.aside)
        assert self.graph is not None and self._output is not None
        self.graph.replay()
        return self._output

    def _compute(self) -> Tensor:
        rows = SlotRows(self.shape.first, self.shape.num_seen, self.positions)
        return self.decoder.stage.decode(self.x, self.decoder.caches, rows)

    def _capture(self, aside: torch.cuda.Stream) -> None:
        """Record what a run launches. Raises: RuntimeError of CUDA where a unit waits for the device."""
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # Libraries choose their kernels and set up at the first use, which can not be captured. It writes into the
            # cache what the replay writes there again.
            self._compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which await messages, go on meanwhile.
        with torch.cuda.graph(graph, self.decoder.pool, aside, capture_error_mode="thread_local"):
            self._output = self._compute()
        self.graph = graph


class FixedDecoder:
    """A stage's decoding over fixed shapes; owns inputs and graphs, which are made when they are first needed.

    Args:
        stage: all of whose units must be able to, see `takes`.
        caches: of its units.
        num_cached: tokens of a row of the cache.
        aside: the stream on which CUDA graphs are captured; None where computations run as they are.
    """

    def __init__(
        self, stage: Stage, caches: Sequence[Any], num_cached: int, aside: torch.cuda.Stream | None = None
    ) -> None:
        self.stage, self.caches, self.num_cached, self.aside = stage, caches, num_cached, aside
        # One for all graphs of the stage, which never run at the same time.
        self.pool = None if aside is None else torch.cuda.graph_pool_handle()
        self._fixed: dict[_Shape, _Fixed] = {}

    @staticmethod
    def takes(stage: Stage) -> bool:
        """Whether all units of the stage compute alike whatever the values, without waiting for the device."""
        return all(getattr(module, "has_fixed_shapes", False) for _, module in stage.units)

    @property
    def captures(self) -> bool:
        """Whether computations become CUDA graphs."""
        return self.aside is not None

    @property
    def num_shapes(self) -> int:
        """How many computations there are, each of them one graph if they are captured."""
        return len(self._fixed)

    def release(self) -> None:
        """Give back inputs, graphs and their memory; later visits make them anew."""
        for fixed in self._fixed.values():
            if fixed.graph is not None:
                fixed.graph.reset()
        self._fixed.clear()
        if self.captures:
            # The old one is gone with its last graph.
            self.pool = torch.cuda.graph_pool_handle()

    def decode(self, x: Tensor, rows: CachedRows, slot: range) -> Tensor:
        """As `Stage.decode` for a visit of the slot with these rows of the cache."""
        num_single = _num_single(rows.pieces)
        if num_single == 0:
            return self.stage.decode(x, self.caches, rows)
        self.stage.copy_prompts(self.caches, rows)
        y = self._of_rows(x[:num_single], rows.pieces[:num_single], slot)
        if num_single == len(rows.pieces):
            return y
        others = CachedRows.of(rows.pieces[num_single:], x.device)
        return torch.cat((y, self.stage.decode(x[num_single:], self.caches, others)))

    def _of_rows(self, x: Tensor, pieces: Sequence[Piece], slot: range) -> Tensor:
        """[T, D] or [T, V] of pieces of one token each."""
        positions = [spare_position(self.num_cached)] * len(slot)
        for piece in pieces:
            positions[piece.row - slot.start] = piece.start
        shape = _Shape(slot.start, len(slot), _num_seen(max(piece.end for piece in pieces), self.num_cached))
        fixed = self._fixed.get(shape)
        if fixed is None:
            fixed = self._fixed[shape] = _Fixed(self, shape, x)
        self.stage.weights_ready()
        places_T = torch.tensor([piece.row - slot.start for piece in pieces]).to(x.device, non_blocking=True)
        fixed.positions.copy_(torch.tensor(positions), non_blocking=True)
        fixed.x.index_copy_(0, places_T, x)
        # A copy, which the next visit does not overwrite.
        return fixed.run().index_select(0, places_T)


def _num_single(pieces: Sequence[Piece]) -> int:
    """How many pieces at the beginning draw a token from one token each; the others read parts of prompts."""
    for number, piece in enumerate(pieces):
        if piece.length > 1 or not piece.sampled:
            return number
    return len(pieces)


def _num_seen(num_needed: int, num_cached: int) -> int:
    """The power of two that is enough, or all of the cache."""
    return min(num_cached, max(_FEWEST_SEEN, 1 << (num_needed - 1).bit_length()))
