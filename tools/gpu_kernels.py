"""A kernel of Triton that holds processors of a GPU for a while, as a receive of NCCL that waits for its message."""

import contextlib
from collections.abc import Iterator

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import globaltimer  # pyright: ignore[reportMissingImports]

_HELD_NS = 200_000_000
# 1,024 threads with 32 values each in registers: no block of a product fits beside it on its processor.
_NUM_VALUES, _NUM_WARPS = 32768, 32


@triton.jit
def _spin(out, until_ns, NUM_VALUES: tl.constexpr):  # pyright: ignore
    """Spin until the device's clock has gone on so far; the values are used throughout, and so stay in registers."""
    places = tl.arange(0, NUM_VALUES)
    values = places.to(tl.float32)
    began = globaltimer()
    now = began
    while now - began < until_ns:
        now = globaltimer()
        values = values * 1.0001 + (now & 1).to(tl.float32)
    # Written by nobody, but the compiler cannot know.
    if now < began:
        tl.store(out + places, values)


@contextlib.contextmanager
def hold(count: int) -> Iterator[None]:
    """Hold so many processors within this context, on a stream of its own, for 0.2 s at most."""
    stream, out = torch.cuda.Stream(), torch.empty(_NUM_VALUES, device="cuda")
    with torch.cuda.stream(stream):
        _spin[(count,)](out, _HELD_NS, NUM_VALUES=_NUM_VALUES, num_warps=_NUM_WARPS)  # pyright: ignore
    # It has begun when it is looked at; nothing on the device says so sooner.
    torch.cuda._sleep(1_000_000)
    yield
    stream.synchronize()
