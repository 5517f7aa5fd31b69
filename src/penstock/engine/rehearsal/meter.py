"""A meter of a rank's actions: memory by kind, arithmetic and bytes moved, on tensors with data or without.

Every operation passes a dispatch mode. A storage is followed by a weak reference from the operation that made it until
it is freed, so it is counted while it is alive, whoever holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.schedule.rehearsal import BytesByKind, MemoryKind, MemoryPoint


@dataclass(eq=False, slots=True)
class _LiveStorage:
    """A storage that is alive."""

    #: its size, and the kind of memory that it is counted as
    num_bytes: int
    kind: MemoryKind
    #: keeps the callback that notes its end
    reference: Any = None
    is_alive: bool = True


_StorageChange = tuple[_LiveStorage, MemoryKind | None, MemoryKind | None]
"""A block, and its kind before and after: None before it is made, None after it is freed."""


@dataclass(slots=True)
class _MeteredInterval:
    """The time between two ends of actions."""

    #: bytes by kind at its beginning
    start: dict[MemoryKind, int]
    changes: list[_StorageChange] = field(default_factory=list)
    flops: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


class Meter(TorchDispatchMode):
    """Follows this thread's storages and operations; entered before the tensors to follow are made.

    A `MeteredRecorder` tells it when each action ends. Storages that an action leaves alive are on a tape, unless they
    are claimed as another kind.
    """

    #: one point for each action that has ended since `restart`
    timeline: list[MemoryPoint]
    #: refuses operations before they run, while an action is under way; see `guarded`
    _guard: Callable[[Any, Any, Any], None] | None
    #: address of a storage -> its block
    _blocks: dict[int, _LiveStorage]
    #: bytes that are alive, by kind
    _alive: dict[MemoryKind, int]
    #: changes and counts since the last action ended
    _interval: _MeteredInterval

    def __init__(self) -> None:
        super().__init__()
        self.timeline, self._guard = [], None
        self._blocks, self._alive = {}, dict.fromkeys(MemoryKind, 0)
        self._interval = _MeteredInterval(dict(self._alive))

    # ---- intervals and kinds

    def restart(self) -> None:
        """Forget all measurements; storages that are alive and unclaimed become of the kind OTHER."""
        for block in self._blocks.values():
            if block.kind in (MemoryKind.TAPE, MemoryKind.TRANSIENT):
                self._move(block, MemoryKind.OTHER)
        self._settle(MemoryKind.OTHER)
        self.timeline.clear()

    def claim(self, kind: MemoryKind, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors as of that kind from now on."""
        for tensor in tensors:
            block = self._block_of(tensor)
            if block is not None:
                self._move(block, kind)

    def reserve(self, kind: MemoryKind, num_bytes: int) -> None:
        """Count memory that no tensor has, from now on."""
        self._alive[kind] += num_bytes
        self._interval = _MeteredInterval(dict(self._alive))

    def point(self, name: str) -> MemoryPoint:
        """End the interval, and add it to the timeline under that name."""
        interval = self._interval
        at_peak = self._settle(MemoryKind.TAPE)
        counts = interval.flops, interval.read_bytes, interval.written_bytes
        self.timeline.append(MemoryPoint(name, at_peak, _some(self._alive), *counts))
        return self.timeline[-1]

    @contextmanager
    def guarded(self, guard: Callable[[Any, Any, Any], None]) -> Iterator[None]:
        """Within this context `guard(operation, args, kwargs)` sees each operation first, and may raise."""
        before, self._guard = self._guard, guard
        try:
            yield
        finally:
            self._guard = before

    # ---- operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else each operation would pass the compiler's guards, which take longer than this does.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked for in every operation on tensors without data
            return func(*args, **kwargs)
        if self._guard is not None and (answer := self._guard(func, args, kwargs)) is not None:
            return answer
        out = func(*args, **kwargs)
        results = _tensors(out)
        for tensor in results:
            self._block_of(tensor)
        if not _is_view(func):
            self._count(func, args, kwargs, out, results)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        interval, inputs = self._interval, {id(t): t for t in (*_tensors(args), *_tensors(tuple(kwargs.values())))}
        interval.read_bytes += sum(map(_touched_bytes, inputs.values()))
        interval.written_bytes += sum(map(_touched_bytes, results))
        # Torch adds formulas to its own when kernels are loaded that not every model needs.
        formula = _FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            interval.flops += formula(*args, **kwargs, out_val=out)

    # ---- storages

    def _block_of(self, tensor: Tensor) -> _LiveStorage | None:
        """The block of a tensor's storage, entered here if it is new; None for a tensor without storage."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = _LiveStorage(storage.nbytes(), MemoryKind.TRANSIENT)
            block.reference = weakref.ref(storage, lambda _: self._free(key))
            self._blocks[key] = block
            self._change(block, None, MemoryKind.TRANSIENT)
        elif block.num_bytes != storage.nbytes():
            self._change(block, block.kind, None)
            block.num_bytes = storage.nbytes()
            self._change(block, None, block.kind)
        return block

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        block.is_alive = False
        self._change(block, block.kind, None)

    def _move(self, block: _LiveStorage, kind: MemoryKind) -> None:
        if block.kind is not kind:
            before, block.kind = block.kind, kind
            self._change(block, before, kind)

    def _change(self, block: _LiveStorage, before: MemoryKind | None, after: MemoryKind | None) -> None:
        if before is not None:
            self._alive[before] -= block.num_bytes
        if after is not None:
            self._alive[after] += block.num_bytes
        self._interval.changes.append((block, before, after))

    def _settle(self, rest: MemoryKind) -> BytesByKind:
        """Begin a new interval; transient storages become `rest`. Returns bytes by kind at the old one's peak."""
        interval = self._interval
        for block in {id(block): block for block, _, _ in interval.changes}.values():
            if block.is_alive and block.kind is MemoryKind.TRANSIENT:
                self._alive[MemoryKind.TRANSIENT] -= block.num_bytes
                self._alive[rest] += block.num_bytes
                block.kind = rest
        at_peak = _at_peak(interval)
        self._interval = _MeteredInterval(dict(self._alive))
        return at_peak


def _at_peak(interval: _MeteredInterval) -> BytesByKind:
    """Bytes by kind at the peak; storages made in the interval count as the kind that they have at its end."""
    total = peak = sum(interval.start.values())
    num_until_peak = 0
    for i, (block, before, after) in enumerate(interval.changes):
        total += block.num_bytes * ((after is not None) - (before is not None))
        if total > peak:
            peak, num_until_peak = total, i + 1
    num_bytes = dict(interval.start)
    for block, *kinds in interval.changes[:num_until_peak]:
        final = block.kind if block.is_alive else MemoryKind.TRANSIENT
        before, after = (final if kind is MemoryKind.TRANSIENT else kind for kind in kinds)
        if before is not None:
            num_bytes[before] -= block.num_bytes
        if after is not None:
            num_bytes[after] += block.num_bytes
    return _some(num_bytes)


def _some(alive: dict[MemoryKind, int]) -> BytesByKind:
    return {kind: num_bytes for kind, num_bytes in alive.items() if num_bytes}


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, also in lists."""
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, tuple | list):
        return []
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors.extend(_tensors(value))
    return tensors


def _touched_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's memory; elements that are one in memory (stride 0) count once."""
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements *= size if stride or not size else 1
    return num_elements * tensor.element_size()


@cache
def _is_view(func: Any) -> bool:
    """True if the operation moves no data: it returns a view, or uninitialised memory."""
    schema = func._schema
    shows = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return shows or schema.name.startswith(("aten::empty", "aten::new_empty"))


# ---- arithmetic that torch's own counter does not know


def _attention(q: Tensor, k: Tensor, v: Tensor, of_keys: int = 1, of_values: int = 1) -> float:
    """Operations of attention: products over the width of keys and over that of values; heads come before tokens.

    Torch's own formula lacks grouped heads before 2.12.
    """
    return 2.0 * q.shape[:-1].numel() * k.shape[2] * (of_keys * q.shape[-1] + of_values * v.shape[-1])


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> float:
    """Operations of attention's backward: the scores again, and gradients of queries, keys, values and scores."""
    return _attention(q, k, v, of_keys=3, of_values=2)


def _attention_of_tiles(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *args: Any, **kwargs: Any) -> float:
    """Operations of the tiled kernel, which takes heads after tokens, and packed sequences by their starts."""
    if starts is not None:
        return _PACKED_ATTENTION(q, _with_heads_of(q, k), _with_heads_of(q, v), starts, *args, **kwargs)
    return _attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _attention_of_tiles_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> float:
    _, _, starts, *_ = args
    if starts is not None:
        return _PACKED_ATTENTION_BACKWARD(grad, q, _with_heads_of(q, k), _with_heads_of(q, v), *args, **kwargs)
    return _attention_backward(grad, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _with_heads_of(q_THK: Tensor, x_TGK: Tensor) -> Tensor:
    """A tensor with as many heads as the queries, for its shape alone."""
    return x_TGK[:, :1].expand(-1, q_THK.shape[1], -1)


_ATEN = torch.ops.aten
_PACKED_ATTENTION = flop_registry[_ATEN._flash_attention_forward]
_PACKED_ATTENTION_BACKWARD = flop_registry[_ATEN._flash_attention_backward]
_FORMULAS: dict[Any, Callable[..., float]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: _attention(q, k, v),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._flash_attention_forward: _attention_of_tiles,
    _ATEN._flash_attention_backward: _attention_of_tiles_backward,
}
if hasattr(_ATEN, "_grouped_mm"):
    # Groups are runs of the rows of `a`, of the columns of `b`, or of what both are summed over.
    _FORMULAS[_ATEN._grouped_mm] = lambda a, b, *args, **kwargs: (
        2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == b.dim() == 3 else 1)
    )
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _FORMULAS[torch.ops.mkldnn._linear_pointwise] = lambda x, weight_OI, *args, out_val, **kwargs: (
        2.0 * out_val.numel() * weight_OI.shape[1]
    )
