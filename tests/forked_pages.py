"""Imported last by the server of tests/fork_server.py: joins what it has imported into large pages.

And sees first which products have the same bits in each row, a sixth of a second that each rank with a decoder would
take: forty sizes, each of which oneDNN compiles.

A fork copies the table of its parent's pages, 70,000 small ones here: two thirds of what a process costs that does
nothing. Where the system cannot join pages, all stays as it is.
"""

import ctypes
import gc
import sys

import torch

from penstock.model.cpu.onednn import fastest_matmul

# From <linux/mman.h>, since Linux 6.1.
_MADV_COLLAPSE = 25
_LARGE_BYTES = 2 << 20


def _join_pages() -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as maps:
        areas = [line.split() for line in maps]
    for span, mode, _, _, inode, *name in areas:
        if mode.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) // _LARGE_BYTES for address in span.split("-"))
            if last > first + 1:
                madvise((first + 1) * _LARGE_BYTES, (last - first - 1) * _LARGE_BYTES, _MADV_COLLAPSE)


for dtype in (torch.float32, torch.bfloat16):
    fastest_matmul().has_apart_rows(torch.ones(1, 1, dtype=dtype))
gc.collect()
gc.freeze()
if sys.platform == "linux":
    _join_pages()
