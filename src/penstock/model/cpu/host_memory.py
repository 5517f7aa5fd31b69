"""Host memory on CPU runs: kept in the process when it is freed, in large pages where much is read again and again."""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
_KEEP_BYTES = 1 << 30
_STEP_BYTES = 64 << 20
_LARGEST_BYTES = 32 << 20  # glibc accepts no more


def keep_freed_memory() -> bool:
    """Make glibc's allocator reuse the memory of freed tensors; returns False where there is another allocator.

    A stage frees and allocates the same activations for every microbatch. Left alone, glibc maps each of them anew,
    and the system fills every page with zeros again: 1-2% of a step of 30 million parameters
    (`python -m benchmarks.train` runs with it, torch's side without). It holds for the whole process.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_BYTES, _M_TRIM_THRESHOLD: _KEEP_BYTES, _M_TOP_PAD: _STEP_BYTES}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def give_back_freed_memory() -> None:
    """Give the system back what has been freed so far, whatever `keep_freed_memory` keeps, where glibc allocates."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
        trim(0)


def prepare_large_pages(num_bytes: int) -> bool:
    """Place the next `num_bytes` of allocations in pages of 2 MiB instead of 4 KiB; returns False if that is refused.

    Generation reads all weights for every token: large pages make that 8% faster at 30 million parameters. glibc is
    asked for the memory, the system is advised how to map it, and all of it is freed again, untouched, so that glibc
    gives it to later tensors. This needs `keep_freed_memory`; a tensor above its limit lies in pages of its own.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not all(hasattr(libc, name) for name in ("mallopt", "madvise")):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = _LARGEST_BYTES - mmap.PAGESIZE  # glibc maps larger ones each by itself
    taken = [start for _ in range(-(-num_bytes // size)) if (start := libc.malloc(size))]
    done = True
    for start in taken:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        done &= libc.madvise(first, end - first, mmap.MADV_HUGEPAGE) == 0
    for start in taken:
        libc.free(start)
    return done


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros to which the system gives memory page by page, as they are written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY), dtype=dtype).view(shape)
