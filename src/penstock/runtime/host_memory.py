"""Host memory on CPU runs: keep freed activations in the process instead of giving them back to the system."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
_KEEP_BYTES = 1 << 30
_STEP_BYTES = 64 << 20
_LARGEST_BYTES = 32 << 20  # glibc takes no more


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to reuse the memory of freed tensors; whether there was such an allocator to tell.

    A stage frees and allocates the same activations for every microbatch. Left alone, glibc maps each of them anew,
    and the system fills every page with zeros again: 1-2% of a step of 30 million parameters
    (`penstock bench train` runs with it, torch's side without). It holds for the whole process.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _LARGEST_BYTES, _M_TRIM_THRESHOLD: _KEEP_BYTES, _M_TOP_PAD: _STEP_BYTES}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
