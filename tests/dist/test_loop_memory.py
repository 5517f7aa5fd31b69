"""Nothing grows while training, scoring and generation take turns on one engine."""

import ctypes
import gc
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from torch import Tensor

from tests.dist.launch import run_ranks
from tests.dist.test_loop import CONFIG, SPEC, batch, evaluate, generate, make, score

pytestmark = pytest.mark.subject("src/penstock/**/*.py")

NUM_ROUNDS, SETTLED = 200, 40
# What a round leaves behind does not depend on how deep the model is, and how long a round takes does.
SHALLOW = replace(CONFIG, num_layers=1)


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>, of all arenas together."""

    _sizes = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _sizes]


def allocated() -> tuple[int, int, int]:
    """Bytes that glibc's allocator has given out, blocks that Python's has, and mappings, such as threads' stacks.

    Not the resident bytes: where small things come to lie in an arena, in pages of 2 MiB, depends on which threads
    were in each other's way. Only glibc from 2.33 on can say its bytes; they are 0 elsewhere.
    """
    libc, num_bytes = ctypes.CDLL(None), 0
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = MallInfo
        info = libc.mallinfo2()
        num_bytes = info.uordblks + info.hblkhd
    return num_bytes, sys.getallocatedblocks(), Path("/proc/self/maps").read_text().count("\n")


def num_tensors() -> int:
    """The fewest of some looks: another thread may hold a message for as long as it takes to put it down."""
    looks = []
    for _ in range(5):
        gc.collect()
        looks.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        time.sleep(0.01)
    return min(looks)


def loop(rank: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tensors that are alive, and what is `allocated`, after some rounds of the loop."""
    engine = make(2, config=SHALLOW)
    tensors, measures = [], []
    for number in range(NUM_ROUNDS):
        for part in (generate, score, evaluate):
            part(engine, number % 7)
        engine.train_batch(batch(number % 7), micro_batches=SPEC)
        if number % SETTLED == SETTLED - 1:
            tensors.append(num_tensors())
            measures.append(allocated())
    engine.close()
    engine.grid.close()
    return tensors, measures


def typical_growth(values: tuple[int, ...]) -> float:
    """Between neighbouring measures, once the second is there."""
    return statistics.median(after - before for before, after in pairwise(values[1:]))


def test_nothing_grows_over_two_hundred_rounds() -> None:
    for tensors, measures in run_ranks(2, loop, timeout_s=110.0):
        assert len(tensors) == NUM_ROUNDS // SETTLED and min(tensors) > 0
        assert len(set(tensors)) == 1, f"tensors that are alive: {tensors}"
        sizes, blocks, mappings = zip(*measures, strict=True)
        # Between two measures there are some 1600 actions. An object or 64 bytes left behind by each would be seen, and
        # so would a thread or a shared file by every other round.
        assert typical_growth(blocks) < 800, f"blocks of Python's allocator: {blocks}"
        assert typical_growth(sizes) < 2**16, f"bytes of glibc's allocator: {sizes}"
        assert typical_growth(mappings) < SETTLED / 2, f"mappings: {mappings}"
