"""The host memory to which a tape's activations move while its backward is far away.

A forward whose tape will move runs under `torch.autograd.graph.saved_tensors_hooks`: what autograd saves is held in
blocks, each the memory of one tensor and its views. A block is moved as a whole, and only its holder lets go of the
memory: what something else still reads stays where it is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.cpu.host_memory import give_back_freed_memory
from penstock.parallel.staging import host_empty

# Smaller ones are not worth a copy.
_LEAST_BYTES = 1 << 12


class Arena:
    """Host memory for moved blocks: pinned for a GPU's; for a CPU's a file, so that the resident set falls.

    The file has no name, and goes with the arena.
    """

    #: the file, once a block of a CPU has moved; its end, and its free places by their length
    _file: IO[bytes] | None
    _end: int
    _free: dict[int, list[int]]

    def __init__(self) -> None:
        self._file, self._end, self._free = None, 0, {}

    def put(self, block: Tensor) -> HostPlace:
        """Copy the elements [n] of a block."""
        num_bytes = block.nbytes
        if block.is_cuda:
            pinned = host_empty(block.shape, block.dtype)
            pinned.copy_(block, non_blocking=True)
            return HostPlace(num_bytes, block.dtype, pinned, -1)
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="penstock-offload-")  # noqa: SIM115
        free = self._free.get(num_bytes)
        start = free.pop() if free else self._end
        self._end = max(self._end, start + num_bytes)
        view = _bytes_of(block)
        while view:
            view = view[os.pwrite(self._file.fileno(), view, start + num_bytes - len(view)) :]
        return HostPlace(num_bytes, block.dtype, None, start)

    def take(self, place: HostPlace, device: torch.device) -> Tensor:
        """The elements [n] of a block that was put there, on its device; the place is free again."""
        block = torch.empty(place.num_bytes // place.dtype.itemsize, dtype=place.dtype, device=device)
        if place.pinned is not None:
            return block.copy_(place.pinned, non_blocking=True)
        assert self._file is not None
        view = _bytes_of(block)
        while view:
            view = view[os.preadv(self._file.fileno(), [view], place.start + place.num_bytes - len(view)) :]
        self._free.setdefault(place.num_bytes, []).append(place.start)
        return block

    def clear(self) -> None:
        """Let go of all places, also those of a step that failed."""
        self._end, self._free = 0, {}


def _bytes_of(block: Tensor) -> memoryview:
    return memoryview(block.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


class HostPlace(NamedTuple):
    """The place of a block in host memory: in pinned memory, or in the arena's file from `start` on."""

    num_bytes: int
    dtype: torch.dtype
    pinned: Tensor | None
    start: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class SavedBlock:
    """The memory of a saved tensor and its views of one dtype."""

    #: all its elements [n]; None while they are away
    data: Tensor | None
    device: torch.device
    place: HostPlace | None = None


class View(NamedTuple):
    """A saved tensor as a view of its block."""

    block: SavedBlock
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor itself. Raises: AssertionError while its block is away."""
        assert self.block.data is not None, "a proved program brings activations back before it reads them"
        return self.block.data.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class Saved:
    """The tensors that the forward of one tape has saved, by blocks."""

    #: where blocks move to, and the storages that are not the tape's own
    arena: Arena
    stays: Container[int]
    #: those of which autograd holds a view; and by storage and dtype, for as long as no storage has been let go of
    blocks: WeakSet[SavedBlock] = field(default_factory=WeakSet)
    _of_storage: WeakValueDictionary[tuple[int, torch.dtype], SavedBlock] = field(default_factory=WeakValueDictionary)

    def noted(self, context: AbstractContextManager[object]) -> AbstractContextManager[object]:
        """The context, within which autograd saves what may be moved."""
        stack = ExitStack()
        stack.enter_context(context)
        stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
        return stack

    def _pack(self, saved: Tensor) -> Any:
        # What is no plain view of its memory is left where it is: sparse tensors, and conjugates that are not computed.
        if saved.layout is not torch.strided or saved.is_conj() or saved.is_neg():
            return saved
        storage = saved.untyped_storage()
        if storage.nbytes() < _LEAST_BYTES or storage._cdata in self.stays:
            return saved
        key = storage._cdata, saved.dtype
        block = self._of_storage.get(key)
        if block is None:
            whole = saved.detach().as_strided((storage.nbytes() // saved.itemsize,), (1,), 0)
            block = self._of_storage[key] = SavedBlock(whole, saved.device)
            self.blocks.add(block)
        return View(block, saved.shape, saved.stride(), int(saved.storage_offset()))

    def offload(self) -> None:
        """Move all blocks to host memory."""
        self._of_storage.clear()
        for block in self.blocks:
            if block.data is not None:
                block.place, block.data = self.arena.put(block.data), None
        # glibc keeps what is freed among other blocks, and on CPUs is told to keep much.
        give_back_freed_memory()

    def reload(self) -> None:
        """Bring all blocks back."""
        for block in self.blocks:
            if block.place is not None:
                block.data, block.place = self.arena.take(block.place, block.device), None


def storages_of(modules: Iterable[nn.Module]) -> frozenset[int]:
    """The storages of parameters and buffers, which are no microbatch's."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def _unpack(saved: Any) -> Tensor:
    return saved.tensor() if isinstance(saved, View) else saved
