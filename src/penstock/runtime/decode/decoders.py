"""The decoders of a rank's stages with their KV caches: of live rows, or of fixed shapes, which CUDA graphs capture.

A batch that samples a token of each live row can be computed for all rows of its slot, dead ones included: then only
values of tensors change from batch to batch. On CUDA the kernels are captured for each slot before any message is
awaited, because a capture waits for all that the device does, and launched together from then on. Where attention reads
what a mask hides, there is a graph for each power of two of tokens to attend to. Weights are read in place and may
change. Prompts are never captured. Without CUDA the same computation runs eagerly.

Shapes: T tokens of the live rows, R rows of the slot, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.model import CachedRows, CacheSize, KVCache, SlotRows, WeightCasts, spare_position
from penstock.model.cpu.host_memory import prepare_large_pages
from penstock.runtime.decode.loop import StageDecoder
from penstock.runtime.stage import Stage
from penstock.settings.declare import NamedValue

_FEWEST_SEEN = 64
"""Tokens of the smallest attention that gets a graph of its own."""

_CACHE_STEP_TOKENS = 64
"""Rows of the KV caches have a multiple of this many tokens."""


_SHARE_OF_CACHES = 0.8
"""The share of a device's free memory that rows may take; graphs and activations are left the rest."""


class DecodeForm(NamedValue):
    """The rows of a slot that compute a token each.

    LIVE_ROWS: live rows alone. ALL_ROWS: all rows of the slot, over shapes that never change. GRAPHS: all rows, as CUDA
    graphs.
    """

    LIVE_ROWS = "live-rows"
    ALL_ROWS = "all-rows"
    GRAPHS = "graphs"


class _FixedShape:
    """The computation of one batch shape, whose inputs stay in place, and so does its output once it is captured.

    x: [R] token ids or [R, D]. positions: [R] int64.
    """

    #: the decoder that owns it
    decoder: "FixedDecoder"
    #: rows of the cache, and how many of their tokens are attended to
    slot: range
    num_seen: int
    #: the inputs: activations or token ids by row, and the rows' positions
    x: Tensor
    positions: Tensor
    #: the captured computation; None if it runs eagerly
    graph: torch.cuda.CUDAGraph | None
    #: the output of the graph
    _output: Tensor | None

    def __init__(self, decoder: "FixedDecoder", slot: range, num_seen: int) -> None:
        self.decoder, self.slot, self.num_seen = decoder, slot, num_seen
        boundary, device = decoder.stage.boundary, decoder.device
        if decoder.stage.index == 0:
            self.x = torch.zeros(len(slot), dtype=torch.int64, device=device)
        else:
            self.x = torch.zeros(len(slot), boundary.hidden_size, dtype=boundary.dtype, device=device)
        # No row is live.
        self.positions = torch.full((len(slot),), spare_position(decoder.num_cached), device=device)
        self.graph = None
        self._output = None

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture the computation; waits for the device.

        Raises: RuntimeError of CUDA if a unit waits for the device.
        """
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries choose kernels at their first use, which cannot be captured.
            self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which wait for messages, may go on.
        with torch.cuda.graph(graph, self.decoder.pool, stream, capture_error_mode="thread_local"):
            self._output = self._compute()
        self.graph = graph

    def run(self) -> Tensor:
        """The output for the present inputs; the next run of any graph overwrites a captured one."""
        if self.graph is None:
            return self._compute()
        assert self._output is not None
        self.graph.replay()
        return self._output

    def _compute(self) -> Tensor:
        rows = SlotRows(self.slot.start, self.num_seen, self.positions)
        return self.decoder.stage.decode(self.x, self.decoder.caches, rows)


@dataclass(eq=False)
class FixedDecoder(StageDecoder):
    """A stage that decodes over fixed shapes (see `takes`), which are made on first use or by `prepare`."""

    #: tokens of a row of the cache
    num_cached: int
    #: of the activations and caches
    device: torch.device = torch.device("cpu")
    #: the stream on which CUDA graphs are captured; None to run eagerly
    capture_stream: torch.cuda.Stream | None = None
    #: memory of all graphs of the stage, which never run at the same time
    pool: Any = field(default=None, init=False)
    #: (slot, number of tokens that are attended to) -> its computation
    _shapes: dict[tuple[range, int], _FixedShape] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.captures:
            self.pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def takes(stage: Stage) -> bool:
        """True if the operations of all units depend on no values and never wait for the device."""
        return all(getattr(module, "has_fixed_shapes", False) for _, module in stage.units)

    @property
    def captures(self) -> bool:
        """True if computations become CUDA graphs."""
        return self.capture_stream is not None

    @cached_property
    def numbers_seen(self) -> list[int]:
        """The tokens that a computation may attend to: powers of two up to all of the cache, if these are masked."""
        if all(isinstance(cache, KVCache) and cache.reads_by_length for cache in self.caches if cache is not None):
            return [self.num_cached]
        powers = (1 << bits for bits in range(_FEWEST_SEEN.bit_length() - 1, self.num_cached.bit_length()))
        return [*(power for power in powers if power < self.num_cached), self.num_cached]

    @property
    def num_shapes(self) -> int:
        """Number of computations, each of them one graph if they are captured."""
        return len(self._shapes)

    def prepare(self, slots: Sequence[range]) -> None:
        """Make all computations of these slots, and capture them; waits for the device."""
        self.stage.wait_for_weights()
        # The largest first: the others find room in its memory.
        for num_seen in reversed(self.numbers_seen):
            for slot in slots:
                self._shape(slot, num_seen)

    def _shape(self, slot: range, num_seen: int) -> _FixedShape:
        if (slot, num_seen) not in self._shapes:
            shape = _FixedShape(self, slot, num_seen)
            if self.capture_stream is not None:
                shape.capture(self.capture_stream)
            self._shapes[slot, num_seen] = shape
        return self._shapes[slot, num_seen]

    def release(self) -> None:
        """Free inputs and graphs; later batches make them anew."""
        for shape in self._shapes.values():
            if shape.graph is not None:
                shape.graph.reset()
        self._shapes.clear()
        if self.captures:
            # The old pool is gone with its last graph.
            self.pool = torch.cuda.graph_pool_handle()

    def decode(self, x: Tensor, rows: CachedRows, slot: range) -> Tensor:
        if any(item.cleaned for item in rows.items):
            # Until it is live again, a row computes from these inputs.
            for shape in self._shapes.values():
                shape.x.zero_()
        # Items that sample a token from one token come first, and then chunks of prompts.
        chunks = (i for i, item in enumerate(rows.items) if item.length > 1 or not item.sampled)
        num_single = next(chunks, len(rows.items))
        if num_single == 0:
            return self.stage.decode(x, self.caches, rows)
        self.stage.copy_prompts(self.caches, rows)
        y = self._decode_rows(x, rows, num_single, slot)
        if num_single == len(rows.items):
            return y
        return torch.cat((y, self.stage.decode(x[num_single:], self.caches, rows.behind(num_single))))

    def _decode_rows(self, x: Tensor, rows: CachedRows, num: int, slot: range) -> Tensor:
        """The output [T, D] or [T, V] of the first so many items, of one token each."""
        num_needed = max(item.end for item in rows.items[:num])
        self.stage.wait_for_weights()
        shape = self._shape(slot, next(number for number in self.numbers_seen if number >= num_needed))
        places_T = rows.rows_T[:num] - slot.start
        shape.positions.fill_(spare_position(self.num_cached)).index_copy_(0, places_T, rows.positions[:num])
        shape.x.index_copy_(0, places_T, x[:num])
        # A copy, which the next batch does not overwrite.
        return shape.run().index_select(0, places_T)


@dataclass(eq=False)
class Decoders:
    """The local stages' decoders and KV caches, kept from one generation to the next."""

    #: the local stages that generate, in order; dtype and device of their activations and caches
    stages: Sequence[Stage]
    dtype: torch.dtype
    device: torch.device
    #: False if no computation can become a CUDA graph
    captures: bool
    #: form -> the local stages' decoders, with their graphs
    by_form: dict[DecodeForm, list[StageDecoder]] = field(default_factory=dict)
    #: stage -> the KV caches of its units
    caches: dict[int, list[Any]] = field(default_factory=dict)
    #: size of the KV caches; None before the first `reserve`
    _size: CacheSize | None = None
    #: the stream on which graphs are captured; kept, because libraries set up a workspace for each stream
    _capture_stream: torch.cuda.Stream | None = None

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make sure that the KV caches are at least of this size."""
        size = self._size
        if size is not None and size.num_rows >= num_rows and size.num_tokens >= num_tokens:
            return
        self.release()
        size = self._size_for(num_rows, num_tokens, self.device)
        self.caches = {stage.index: stage.new_caches(size) for stage in self.stages}
        self._size = size

    def cache_bytes(self, num_rows: int, num_tokens: int) -> int | None:
        """Bytes of the local stages' KV caches for rows of so many tokens; nothing is allocated.

        None for layers of other libraries, whose caches grow as they are used.
        """
        size = self._size_for(num_rows, num_tokens, torch.device("meta"))
        caches = [cache for stage in self.stages for cache in stage.new_caches(size) if cache is not None]
        return sum(cache.num_bytes for cache in caches) if all(isinstance(cache, KVCache) for cache in caches) else None

    def room(self, num_tokens: int) -> int | None:
        """Rows of so many tokens that the device's memory has room for; None where it is no device's, or unknown."""
        row_bytes = self.cache_bytes(1, num_tokens)
        if self.device.type != "cuda" or not row_bytes:
            return None
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free += sum(cache.num_bytes for caches in self.caches.values() for cache in caches if cache is not None)
        return int(_SHARE_OF_CACHES * free) // row_bytes

    def _size_for(self, num_rows: int, num_tokens: int, device: torch.device) -> CacheSize:
        return CacheSize(num_rows, -(-num_tokens // _CACHE_STEP_TOKENS) * _CACHE_STEP_TOKENS, self.dtype, device)

    def pack_weights(self, casts: WeightCasts) -> None:
        """Pack all weights until `casts` drops them; on a CPU alone, since other devices read them as they are."""
        if self.device.type != "cpu":
            return
        weights = [weight for stage in self.stages for _, weight in stage.named_parameters()]
        prepare_large_pages(sum(weight.nbytes for weight in weights))
        for stage in self.stages:
            stage.pack_weights(casts)

    def of(self, form: DecodeForm, slots: Sequence[range]) -> list[StageDecoder]:
        """The local stages' decoders, kept as long as the caches are; graphs of these slots are captured."""
        captures = form is DecodeForm.GRAPHS and self.captures
        if form not in self.by_form:
            decoders = self.by_form[form] = list[StageDecoder]()
            for stage in self.stages:
                if form is DecodeForm.LIVE_ROWS or not FixedDecoder.takes(stage):
                    decoders.append(StageDecoder(stage, self.caches[stage.index]))
                    continue
                if captures and self._capture_stream is None:
                    self._capture_stream = torch.cuda.Stream()
                assert self._size is not None
                stream = self._capture_stream if captures else None
                caches, num_tokens = self.caches[stage.index], self._size.num_tokens
                decoders.append(FixedDecoder(stage, caches, num_tokens, self.device, stream))
        for decoder in self.by_form[form] if captures else ():
            if isinstance(decoder, FixedDecoder):
                decoder.prepare(slots)
        return self.by_form[form]

    def release(self) -> None:
        """Free the memory of caches and graphs; the next `reserve` allocates anew."""
        for decoders in self.by_form.values():
            for decoder in decoders:
                if isinstance(decoder, FixedDecoder):
                    decoder.release()
        self._size, self.caches, self.by_form = None, {}, {}
